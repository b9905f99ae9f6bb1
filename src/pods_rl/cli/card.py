"""``pods card``: the model card of a run, and its push to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..errors import UserError
from ..text import console, safe_text


def card(
    run: Annotated[Path, Argument(help="A run directory.")],
    output: Annotated[Path | None, Option(help="Directory for README.md and its figure. [default: RUN/card]")] = None,
    push: Annotated[
        bool, Option("--push", help="Push the final policy and the card to the hub; needs HF_TOKEN.")
    ] = False,
    repo: Annotated[
        str | None, Option(help="With --push: the repository. [default: the recipe's hub_model_id, or the run's name]")
    ] = None,
) -> None:
    """Write the model card of a run: method, evaluations, figure, recipe, versions; --push sends it with the policy.

    \b
    Examples:
      pods card runs/mine
      pods card runs/mine --push --repo me/my-policy
    """
    from ..runs import Run, write_atomic

    found = Run.open(run)
    if repo is not None and not push:
        raise UserError(f"--repo {repo} names where to push: add --push.")
    if push:
        from ..recipe.available import check_pushable
        from ..training.publishing import push as push_run

        check_pushable("--push")
        config = found.config
        repo = repo or config.get("hub_model_id")
        try:
            url = push_run(found, repo, private=config.get("hub_private_repo"), revision=config.get("hub_revision"))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"Not pushed: {' '.join(str(error).split())}") from error
        console().print(f"pushed: {safe_text(url)}")
        if output is None:
            return
    from ..report.card import FIGURE, model_card

    folder = output or found.path / "card"
    text, figure = model_card(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "README.md", text)
        if figure:
            write_atomic(folder / FIGURE, figure)
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror}. Choose a directory with --output.") from error
    console().print(safe_text(folder / "README.md"))
