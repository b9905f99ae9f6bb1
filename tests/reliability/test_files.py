"""Files: nothing is written elsewhere, and no pickle goes out."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import pods_rl

from .. import DEADLINE

PACKAGE = Path(pods_rl.__file__).parent
REPOSITORY = Path(__file__).parents[2]


def files_below(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*") if not path.is_dir()}


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
    """A folder after a training of two steps and its report, with a home and temporary files next to it."""
    folder = tmp_path_factory.mktemp("files") / "work"
    folder.mkdir()
    (folder / "r.yaml").write_text(yaml.safe_dump(TINY))
    home, temporary = folder.parent / "home", folder.parent / "temporary"
    home.mkdir()
    temporary.mkdir()
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(("HF_", "XDG_", "MPL", "TORCH"))}
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
    }
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "pods_rl", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    return folder


def test_nothing_is_written_outside_the_output(folder: Path) -> None:
    assert (folder / "out").is_dir()
    home, temporary = folder.parent / "home", folder.parent / "temporary"
    expected = (str(folder / "out"), str(folder / "r.yaml"), *(str(home / cache) for cache in CACHES))
    assert [path for path in files_below(folder, home, temporary) if not str(path).startswith(expected)] == []


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
    assert [path for path in everything if is_pickle(path)] == []
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
