"""Files: torn runs still open, nothing is written elsewhere, no pickle goes out."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import pods_rl
from pods_rl.report import build_report

from .. import DEADLINE
from .synthetic import write_run

PACKAGE = Path(pods_rl.__file__).parent
REPOSITORY = Path(__file__).parents[2]


def files_below(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*") if not path.is_dir()}


# --------------------------------------------------------------------------------- torn and old runs

Damage = tuple[str, str, bytes | None]  # what it is, the file, and what it holds then; None: it is gone


def damages(run: Path, share: int, seed: int = 7) -> Iterator[Damage]:
    """Each file of a run cut at each `share`-th of its length, empty, gone, of noise, and of another kind."""
    draw = random.Random(seed)
    for path in sorted(files_below(run)):
        name, whole = str(path.relative_to(run)), path.read_bytes()
        if path.name == ".lock":
            continue
        for part in range(1, share):
            yield f"cut at {part}/{share}", name, whole[: len(whole) * part // share]
        yield "empty", name, b""
        yield "gone", name, None
        yield "noise", name, draw.randbytes(len(whole))
        yield "a bit turned", name, _turned(whole, draw)
        yield "zeros, as after a power cut", name, bytes(len(whole))
        yield "a list", name, b"[1, 2, 3]\n"
        yield "null", name, b"null\n"
        yield "deeply nested", name, b"[" * 3000
        yield "a huge number", name, b'{"step": 1e999, "seconds": 123456789012345678901234567890, "accuracy": 1e400}\n'


def _turned(whole: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]


@pytest.mark.timeout(3000)  # the full form makes hundreds of reports
@pytest.mark.parametrize(("share", "every"), [(4, 60), pytest.param(20, 1, marks=pytest.mark.reliability)])
def test_a_damaged_run_still_opens(share: int, every: int, tmp_path: Path) -> None:
    """`pods report` of an experiment with one damaged run."""
    root = tmp_path / "experiment"
    runs = [write_run(root / arm / f"seed-{seed}", arm=arm, seed=seed) for arm in ("grpo", "pods") for seed in (1, 2)]
    (root / "experiment.yaml").write_text("arms: {grpo: {}, pods: {}}\nseeds: [1, 2]\n")
    run = runs[-1]
    kept = {path: path.read_bytes() for path in files_below(run)}
    for what, name, content in list(damages(run, share))[::every]:
        damaged = run / name
        damaged.unlink()
        if content is not None:
            damaged.write_bytes(content)
        try:
            files = build_report(root, tmp_path / "out")
            assert files.html.read_text(encoding="utf-8").rstrip().endswith("</html>")
        except Exception as error:
            raise AssertionError(f"{name}, {what}: {type(error).__name__}: {error}") from error
        damaged.write_bytes(kept[damaged])


# -------------------------------------------------------------------------- nothing written elsewhere

TINY = {
    "max_steps": 2, "num_generations": 4, "num_rollouts": 6, "per_device_train_batch_size": 4, "save_steps": 1,
    "max_completion_length": 8, "task_train_size": 4, "task_test_size": 2, "ledger_every": 1, "use_cpu": True,
    "bf16": False, "threads": 1, "log_completions": True, "logging_steps": 1, "report_to": "tensorboard",
}  # fmt: skip
COMMANDS = (
    ["train", "--config", "r.yaml", "--output", "out/run"],
    ["report", "out/run", "--output", "out/report"],
)


# Caches that belong to the person and not to a run, where their libraries keep them (docs/reliability.md)
CACHES = (".cache/huggingface", ".cache/matplotlib", ".config/matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after a training of two steps and its report."""
    folder = tmp_path_factory.mktemp("files") / "work"
    folder.mkdir()
    (folder / "r.yaml").write_text(yaml.safe_dump(TINY))
    for command in COMMANDS:
        carry_out(folder, command)
    return folder


def carry_out(folder: Path, command: list[str]) -> None:
    """Run a command in a folder, with a home and a place for temporary files next to it."""
    home, temporary = folder.parent / "home", folder.parent / "temporary"
    home.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(("HF_", "XDG_", "MPL", "TORCH"))}
    done = subprocess.run(
        [sys.executable, "-m", "pods_rl", *command],
        cwd=folder,
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_nothing_is_written_outside_the_output(folder: Path) -> None:
    assert (folder / "out").is_dir()
    home, temporary = folder.parent / "home", folder.parent / "temporary"
    expected = (str(folder / "out"), str(folder / "r.yaml"), *(str(home / cache) for cache in CACHES))
    found = files_below(folder, home, temporary)
    assert [path for path in found if not str(path).startswith(expected)] == []


# ------------------------------------------------------------------------------------------- no pickle


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or an archive with one, by its first bytes and its names."""
    with path.open("rb") as file:
        head = file.read(2)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05") or path.suffix in (".pkl", ".pickle", ".joblib")


def test_no_pickle_is_published(folder: Path) -> None:
    """Neither in the package and the results, nor in a final policy; a checkpoint has torch's own, to resume from."""
    run = folder / "out" / "run"
    final = files_below(run / "checkpoints" / "final")
    assert {path.name for path in final} >= {"model.safetensors", "config.json", "tokenizer.json"}
    shipped = [path for path in files_below(PACKAGE) if "__pycache__" not in path.parts]
    results = files_below(REPOSITORY / "docs") if (REPOSITORY / "docs").is_dir() else set()
    rest = {path for path in files_below(run) if path.parent.parent.name != "checkpoints"}
    everything = [*final, *shipped, *results, *rest, *files_below(folder / "out" / "report")]
    pickles = [path for path in everything if is_pickle(path)]
    assert pickles == []
    resumed = {path.name for path in files_below(run / "checkpoints") - final if is_pickle(path)}
    assert resumed <= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}  # transformers loads them with weights_only


# --------------------------------------------------------------------------------------- our own code


def test_our_code_trusts_nothing_that_it_loads() -> None:
    """ruff's rules refuse pickle, eval, exec and a shell (pyproject.toml); these options it does not know."""
    for folder in (PACKAGE, REPOSITORY / "benchmarks", REPOSITORY / "tools"):
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for option in ("trust_remote_code=True", "weights_only=False", "allow_pickle=True"):
                assert option not in text, path
