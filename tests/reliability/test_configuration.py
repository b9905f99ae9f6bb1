"""A recipe that cannot work is refused before a model loads, and the message says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pods_rl.cli import app
from pods_rl.errors import UserError
from pods_rl.recipe import load_recipe

from .synthetic import write_run

GOOD = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False}
BILLION = "&a [x, x, x, x, x, x, x, x, x]" + "".join(
    f", &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def recipe(**keys: object) -> Callable[[Path], list[str]]:
    """Words of `pods train` with a recipe of these keys."""

    def make(folder: Path) -> list[str]:
        return text(yaml.safe_dump(GOOD | keys))(folder)

    return make


def text(content: str | bytes) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        path = folder / "r.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return ["--config", str(path)]

    return make


def rows(*lines: str, **keys: object) -> Callable[[Path], list[str]]:
    """A recipe with a data set of these lines, and another good one to test on."""

    def make(folder: Path) -> list[str]:
        (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
        (folder / "test.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n", encoding="utf-8")
        data = {"dataset_name": str(folder / "train.jsonl"), "dataset_test_name": str(folder / "test.jsonl")}
        return recipe(**{"model_name_or_path": "tiny", **data, **keys})(folder)

    return make


def huge(folder: Path) -> list[str]:
    path = folder / "r.yaml"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # takes no room on the disk
    return ["--config", str(path)]


def pipe(folder: Path) -> list[str]:
    os.mkfifo(folder / "pipe.yaml")
    return ["--config", str(folder / "pipe.yaml")]


def empty_model(folder: Path) -> list[str]:
    (folder / "model").mkdir()
    return recipe(model_name_or_path=str(folder / "model"))(folder)


def in_a_file(folder: Path) -> list[str]:
    """Nobody may write there, root neither: a file stands where the folder should."""
    (folder / "runs").write_text("")
    return [*recipe()(folder), "--output", str(folder / "runs" / "mine")]


def on_a_system_that_takes_nothing(folder: Path) -> list[str]:
    return [*recipe()(folder), "--output", "/proc/self/fdinfo/run"]


def in_a_run(folder: Path) -> list[str]:
    return [*recipe()(folder), "--output", str(write_run(folder / "run") / "inner")]


def over_a_run(folder: Path) -> list[str]:
    return [*recipe()(folder), "--output", str(write_run(folder / "run"))]


def words(*more: str) -> Callable[[Path], list[str]]:
    return lambda folder: [*recipe()(folder), *more]


GOOD_ROW = json.dumps({"question": "1+2?", "answer": "3"})

# what is wrong -> how it is made, and what the message says: what came, what was expected, what to do
BAD: dict[str, tuple[Callable[[Path], list[str]], Sequence[str]]] = {
    "unknown key": (recipe(num_rolouts=64), ["r.yaml:", "num_rolouts", "unknown key", "Did you mean num_rollouts?"]),
    "wrong type": (recipe(num_generations="many"), ["num_generations", "the text 'many'", "expected a whole number"]),
    "1e-6 misspelt": (recipe(learning_rate="1e--6"), ["learning_rate", "the text '1e--6'", "expected a number"]),
    "duplicate key": (text("seed: 1\nbeta: 0\nseed: 2\n"), ["r.yaml:3", "seed is a duplicate key", "line 1", "keep"]),
    "m > n": (recipe(num_rollouts=2), ["num_rollouts", "2", "num_generations", "4"]),
    "m = 1": (recipe(num_generations=1, per_device_train_batch_size=1), ["num_generations", "1", "at least 2"]),
    "batch arithmetic": (recipe(per_device_train_batch_size=3), ["3 rows", "num_generations", "4", "Set"]),
    "a model that is not there": (recipe(model_name_or_path="./no/model"), ["./no/model", "no such directory"]),
    "a folder that is no model": (empty_model, ["model_name_or_path", "holds no config.json"]),
    "an unreachable hub": (
        recipe(model_name_or_path="no-owner/no-model"), ["no-owner/no-model", "hub cannot be reached", "local folder"]
    ),
    "an unreachable data set": (
        recipe(model_name_or_path="tiny", dataset_name="no-owner/no-data"), ["no-owner/no-data", "hub", "local file"]
    ),
    "missing column": (
        rows(GOOD_ROW, question_column="questoin"), ["questoin", "columns question, answer", "Did you mean question?"]
    ),
    "empty data set": (rows(""), ["train.jsonl", "holds no rows", "expected a JSON object on each line"]),
    "broken row": (rows(GOOD_ROW, '{"question": "1+'), ["train.jsonl, line 2", "not JSON", "correct that row"]),
    "a row that is no object": (rows(GOOD_ROW, "[1, 2]"), ["line 2", "is a list", "expected a JSON object"]),
    "a folder that is a file": (in_a_file, ["runs/mine", "Cannot write", "Not a directory", "--output"]),
    "a folder nobody writes to": (on_a_system_that_takes_nothing, ["/proc/self", "Cannot write", "--output"]),
    "inside a run": (in_a_run, ["inner", "inside the run", "--output"]),
    "over a run": (over_a_run, ["already holds a run (finished)", "--output", "--resume"]),
    "a list": (text("- max_steps: 1\n"), ["r.yaml", "holds a list", "expected `key: value` lines"]),
    "nothing": (text("# nothing\n"), ["r.yaml", "holds nothing", "expected `key: value` lines"]),
    "tabs": (text("max_steps: 1\n\tseed: 2\n"), ["r.yaml:2", "\\t", "Expected `key: value`"]),
    "3 GB": (huge, ["r.yaml", "3,221,225,472 bytes", "expected a YAML recipe"]),
    "python tags": (text("seed: !!python/object/apply:os.getpid []\n"), ["r.yaml:1", "python/object", "Expected"]),
    "a billion laughs": (text(f"num_generations: [{BILLION}]\n"), ["r.yaml:1", "holds more than 10,000 keys"]),
    "merge keys": (text(f"a: &a {{x: 1}}\n{MERGES}"), ["r.yaml", "holds more than 10,000 keys", "each alias"]),
    "an alias to itself": (text("generation_kwargs: &a {x: *a}\n"), ["r.yaml:1", "an alias contains itself"]),
    "many thousands": (text("".join(f"key{i}: 1\n" for i in range(60_000))), ["708,890 bytes", "at most"]),
    "a number in base 60": (text(f"seed: 1{':1' * 90_000}\n"), ["r.yaml:1", "a number of 180,001 characters", "400"]),
    "a date": (text("generation_kwargs: {a: 2020-01-01}\n"), ["r.yaml:1", "datetime.date", "put it in quotes"]),
    "bytes": (text("generation_kwargs: {a: !!binary aGk=}\n"), ["r.yaml:1", "bytes b'hi'", "put it in quotes"]),
    "a set": (text("generation_kwargs: {a: !!set {x}}\n"), ["r.yaml:1", "set {'x'}", "put it in quotes"]),
    "a device": (lambda _: ["--config", "/dev/zero"], ["/dev/zero", "neither a file", "expected"]),
    "a pipe": (pipe, ["pipe.yaml", "neither a file", "expected"]),
    "a name too long": (lambda _: ["a" * 5000], ["aaa...", "cannot be a path", "too long"]),
    "a data set's name too long": (
        recipe(model_name_or_path="tiny", dataset_name="a" * 5000), ["aaa...", "cannot be a path", "too long"]
    ),
    "a logger that is not there": (recipe(report_to="tensorbord"), ["'tensorbord'", "expected one of", "tensorboard"]),
    "two libraries that are not there": (
        recipe(report_to=["clearml", "dvclive"]), ["needs clearml and dvclive", "pip install clearml dvclive"]
    ),
    "processes without end": (words("--num_processes", "1000000000"), ["1000000000", "at most 1024"]),
    "a seed too large": (recipe(seed=2**32), ["seed = 4294967296", "at most 4294967295"]),
    "a module that is not there": (recipe(rule="nowhere_at_all:best"), ["rule", "no module nowhere_at_all"]),
    "nested without end": (text("seed: " + "[" * 1500), ["r.yaml", "nested too deeply", "Expected"]),
    "not text": (text(b"seed: \xff\xfe\x00"), ["r.yaml", "not text in UTF-8", "expected"]),
    "unknown rule": (recipe(rule="max_varience"), ["max_varience", "expected one of", "Did you mean max_variance?"]),
    "unknown reward": (
        recipe(task_rewards={"acuracy": 1.0}), ["task_rewards", "acuracy", "expected", "Did you mean accuracy?"]
    ),
    "a weight that is text": (recipe(task_rewards={"accuracy": "much"}), ["accuracy", "'much'", "expected a weight"]),
    "unknown task": (recipe(task="arithmetics"), ["arithmetics", "expected one of", "Did you mean arithmetic?"]),
    "negative learning rate": (recipe(learning_rate=-1e-6), ["learning_rate = -1e-06", "at least 0"]),
    "not a number": (text("max_steps: 1\ntemperature: .nan\n"), ["temperature", "nan", "expected a number"]),
    "no end": (text("seed: 1\n"), ["No limit is set", "set max_seconds"]),
    "no such accelerate configuration": (
        words("--num_processes", "2", "--accelerate_config", "dpp"), ["dpp", "neither a file", "one of ddp"]
    ),
    "no such file": (lambda _: ["--config", "mine.yaml"], ["mine.yaml", "neither a file", "expected"]),
    "no such recipe": (lambda _: ["--recipe", "tiny-pod"], ["tiny-pod", "no shipped", "Did you mean tiny-pods?"]),
    "nothing to resume": (words("--resume", "--output", "nowhere"), ["nowhere", "no run to resume"]),
    "a word too many": (words("seed", "3"), ["'seed'", "expected --key value", "as in --seed 1"]),
}  # fmt: skip
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network without a hub, whatever this machine's is."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", NO_HUB["HF_ENDPOINT"])
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", NO_HUB["HF_ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("what", BAD)
def test_refused_before_a_model_loads(what: str, no_hub: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make, says = BAD[what]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pods_rl.training.run", None)  # importing it, and so torch, is an error
    result = CliRunner().invoke(app, ["train", *make(tmp_path)])
    assert isinstance(result.exception, UserError), repr(result.exception)
    message = str(result.exception)
    assert [part for part in says if part not in message] == [], message
    assert len(message) < 700


@pytest.mark.reliability
def test_every_bad_recipe_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a person starts it: exit code 2, the message alone, no torch; the seconds are printed."""
    seconds = {}
    for place, (what, (make, says)) in enumerate(BAD.items()):
        folder = tmp_path / str(place)
        folder.mkdir()
        program = "import sys, pods_rl.cli as c\ntry: c.main()\nfinally: print('torch' in sys.modules)"
        before = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program, "train", *make(folder)],
            cwd=folder, env={**os.environ, **NO_HUB}, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        seconds[what] = time.perf_counter() - before
        assert (done.returncode, done.stdout) == (2, "False\n"), (what, done)
        assert done.stderr.startswith("Error: "), what
        assert [part for part in says if part not in done.stderr] == [], done.stderr
    slowest = max(seconds, key=lambda what: seconds[what])
    late = sum(value > 2 for value in seconds.values())
    print(
        f"\nconfiguration: {len(BAD)} of {len(BAD)} refused before torch is imported; {len(BAD) - late} within 2 s, "
        f"the slowest, {slowest}, after {seconds[slowest]:.2f} s"
    )


def test_a_number_that_yaml_calls_text_is_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("max_steps: 1\nlearning_rate: 1e-6\n")
    assert load_recipe(tmp_path / "r.yaml").values["learning_rate"] == 1e-6


def test_a_project_with_a_config_of_its_own_is_no_run(tmp_path: Path) -> None:
    from pods_rl.runs import RunWriter

    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    RunWriter(tmp_path / "runs" / "mine").close()
