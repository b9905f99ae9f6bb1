"""Push a run's final policy to the hub, with its model card."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import UserError
from ..recipe import Recipe
from ..runs import Run
from ..runs.checkpoints import MANIFEST
from ..text import console, safe_text

# weights as safetensors, configurations, tokenizers; a pickle, a log or anything else is never pushed
_PUSHED = re.compile(r".*\.safetensors|.*\.json|.*\.jinja|tokenizer\.model|merges\.txt|vocab\.txt")
_LONGEST = 96  # characters of a repository's name


def repository_name(run: Run) -> str:
    """Return the run's name as the hub allows it: ``experiment-arm-seed-3``."""
    name = re.sub(r"[^A-Za-z0-9_.-]+|-{2,}|\.{2,}", "-", run.name)[:_LONGEST].strip("-.")
    return name.removesuffix(".git") or "pods-run"


def policy_files(folder: Path) -> list[Path]:
    """Return the files of a policy that may be pushed: regular files of the allowed names, without our manifest."""
    found = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    return sorted(path for path in found if _PUSHED.fullmatch(path.name) and path.name != MANIFEST)


def push(run: Run, repository: str | None = None, *, private: bool | None = None, revision: str | None = None) -> str:
    """Push ``checkpoints/final`` and the model card in one commit; return the repository's address.

    Args:
        run: a run with a final policy.
        repository: its name; None: named after the run, in the namespace of the token.
        private: of a repository that is created; None: the account's default.
        revision: the branch; None: main.

    Raises:
        UserError: the run has no final policy.
        Exception: whatever the hub's client raises.
    """
    final = run.final_checkpoint
    files = policy_files(final) if final else []
    if not any(path.suffix == ".safetensors" for path in files):
        raise UserError(f"{run.path} ({run.state}) has no final policy to push: expected checkpoints/final.")
    from huggingface_hub import CommitOperationAdd, HfApi

    from ..report.card import FIGURE, model_card  # matplotlib, which a run without a push does not need

    api = HfApi()
    created = api.create_repo(repository or repository_name(run), private=private, exist_ok=True)
    if revision:
        api.create_branch(created.repo_id, branch=revision, exist_ok=True)
    text, figure = model_card(run)
    operations = [CommitOperationAdd(path.name, str(path)) for path in files]
    operations.append(CommitOperationAdd("README.md", text.encode("utf-8")))
    operations += [CommitOperationAdd(FIGURE, figure)] if figure else []
    message = f"Policy after {run.step} steps of pods-rl"
    api.create_commit(created.repo_id, operations, commit_message=message, revision=revision)
    return str(created)


def push_finished(recipe: Recipe, run: Run) -> None:
    """Push a run, if it finished, as its recipe says; a failure is only a warning, since the run is complete."""
    if run.state != "finished":
        return
    name, private, revision = (recipe.values.get(f"hub_{key}") for key in ("model_id", "private_repo", "revision"))
    try:
        url = push(run, name, private=private, revision=revision)
    except Exception as error:  # the network, the hub, its client
        reason = " ".join(str(error).split()) or type(error).__name__
        console(stderr=True).print(
            f"[yellow]Not pushed to the hub:[/yellow] {safe_text(reason)} The run is complete. Push it with: "
            f"pods card {safe_text(run.path)} --push"
        )
    else:
        console().print(f"pushed: {safe_text(url)}")
