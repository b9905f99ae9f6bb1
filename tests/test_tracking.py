"""Trackers of `report_to`, read back with the trackers' own libraries."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.policies.build import build_model, build_tokenizer
from pods_rl.recipe import load_recipe
from pods_rl.recipe.available import trackers

from .cli import pods
from .fake_hub import fake_hub

NAMES = [name for name in ("tensorboard", "trackio", "wandb", "mlflow") if find_spec(name)]
RECIPE = {
    "model_name_or_path": "./policy", "num_generations": 2, "num_rollouts": 4, "per_device_train_batch_size": 2,
    "max_completion_length": 6, "max_steps": 3, "save_steps": 2, "gradient_checkpointing": False, "use_cpu": True,
    "eval_prompts": 4, "eval_repeats": 2, "ledger_every": 0, "threads": 1,
    "report_to": NAMES or "none", "push_to_hub": True,
}  # fmt: skip
STEPS = {"reward": [1, 2, 3, 4], "accuracy": [0, 3, 4], "pass@2": [0, 3, 4], "train_seconds": [0, 3, 4]}
VARIABLES = ("WANDB", "TRACKIO", "MLFLOW", "TENSORBOARD")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run of an experiment with every tracker here, stopped after step 3 and resumed from step 2 to step 4."""
    place = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch, fake_hub(patch) as hub:
        patch.chdir(place)
        for name in [name for name in os.environ if name.startswith(VARIABLES)]:
            patch.delenv(name)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        tokenizer = build_tokenizer()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        build_model(tokenizer, **sizes).save_pretrained("policy")
        tokenizer.save_pretrained("policy")
        Path("r.yaml").write_text(yaml.safe_dump(RECIPE))
        before = {name for name in os.environ if name.startswith(VARIABLES)}
        pods("train", "--config", "r.yaml", "--output", "sums/pods/seed-3")
        shutil.rmtree("sums/pods/seed-3/checkpoints/checkpoint-3")
        pods("train", "--output", "sums/pods/seed-3", "--resume", "--max_steps", "4")
        after = {name for name in os.environ if name.startswith(VARIABLES)} - {"WANDB_SERVICE"}  # of its own process
        assert after == before
        assert [name for name, _ in hub.commits] == ["me/sums-pods-seed-3/main"] * 2  # at the end of each
        assert all(not file.endswith((".bin", ".pt", ".txt")) for _, files in hub.commits for file in files)
    assert sorted(path.name for path in place.iterdir()) == ["policy", "r.yaml", "sums"]  # nothing is elsewhere
    return place / "sums/pods/seed-3"


@pytest.fixture
def folder(tracked, request):
    name = request.node.name.removeprefix("test_").partition("_")[0]
    if name not in NAMES:
        pytest.skip(f"{name} is not installed")
    assert not list((tracked / "checkpoints").glob("**/*tfevents*"))
    return tracked / "tracking"


def test_tensorboard_has_each_step_and_evaluation_once(folder, tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    found = {name: [event.step for event in events.Scalars(tag)] for name, tag in tags().items()}
    assert found == STEPS
    rows = [json.loads(line) for line in (tracked / "evals.jsonl").read_text().splitlines()]
    values = {event.step: event.value for event in events.Scalars("eval/accuracy")}
    assert values[4] == pytest.approx(rows[-1]["accuracy"])


def test_trackio_resumes_into_one_run_with_its_group_and_recipe(folder):
    (path,) = (folder / "trackio").glob("*.db")
    assert path.stem == "sums"  # the experiment is the project
    with sqlite3.connect(path) as database:
        logged = [(name, json.loads(row)) for name, row in database.execute("select run_name, metrics from metrics")]
        (config,) = {text for (text,) in database.execute("select config from configs")}
    assert {name for name, _ in logged} == {"sums-pods-seed-3"}
    rows = [row for _, row in logged]
    found = {name: [row["train/global_step"] for row in rows if tag in row] for name, tag in tags().items()}
    assert found == STEPS
    config = json.loads(config)
    assert (config["_Group"], config["seed"], config["num_rollouts"]) == ("pods", 42, 4)


def test_wandb_offline_keeps_one_id(folder):
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    found: dict[str, list[int]] = {name: [] for name in STEPS}
    runs = set()
    for path in files:
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                run = record.run
                runs.add((run.run_id, run.display_name, run.run_group, run.project))
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for name, tag in tags().items():
                found[name] += [json.loads(items["train/global_step"])] if tag in items else []
    assert len(files) == 2
    ((run_id, *names),) = runs
    assert names == ["sums-pods-seed-3", "pods", "sums"]
    assert run_id == json.loads((folder / "state.json").read_text())["wandb"]
    assert found == STEPS


def records(path):
    """The records of a file of wandb: LevelDB's log format after a header of 7 bytes, in blocks of 32 KiB."""
    data, place, parts = path.read_bytes(), 7, []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield b"".join(parts)
            parts = []


def test_mlflow_resumes_into_one_run(folder, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((folder / "mlflow").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "sums"]
    (run,) = client.search_runs([experiment.experiment_id])
    names = {name: name if name == "reward" else f"eval_{name.replace('@', '_')}" for name in STEPS}
    found = {name: [m.step for m in client.get_metric_history(run.info.run_id, key)] for name, key in names.items()}
    assert found == STEPS
    assert (run.info.run_name, run.data.tags["arm"], run.info.status) == ("sums-pods-seed-3", "pods", "FINISHED")
    assert run.data.params["num_rollouts"] == "4"


def tags() -> dict[str, str]:
    return {name: f"{'train' if name == 'reward' else 'eval'}/{name}" for name in STEPS}


# ------------------------------------------------------------------------------------------------ before anything loads


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No key and no setting of wandb."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("pods_rl.recipe.available._is_there", lambda module: True)
    return tmp_path


def check():
    load_recipe("tiny-pods", {"report_to": "wandb"}).check_installed()


def test_wandb_without_a_key_is_refused_before_it_could_ask(clean):
    with pytest.raises(UserError, match=r"tiny-pods.*wandb needs a key: set WANDB_API_KEY.*WANDB_MODE=offline"):
        check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")],
)
def test_a_key_or_offline_mode_in_the_environment_is_enough(clean, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    check()


@pytest.mark.parametrize(
    ("file", "text"),
    [(".netrc", "machine api.wandb.ai login user password k"), ("wandb/settings", "[default]\nmode = offline")],
)
def test_a_login_or_a_setting_is_enough(clean, file, text):
    (clean / file).parent.mkdir(exist_ok=True)
    (clean / file).write_text(text)
    check()


def test_a_login_at_another_server_is_not(clean, monkeypatch):
    (clean / ".netrc").write_text("machine api.wandb.ai login user password k")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(UserError, match="wandb needs a key"):
        check()


def test_all_means_those_that_are_installed(monkeypatch):
    monkeypatch.setattr("pods_rl.recipe.available._is_there", lambda module: module in ("wandb", "tensorboard"))
    assert trackers({"report_to": "all"}) == ("wandb", "tensorboard")
    assert trackers({"report_to": ["none"]}) == ()


def test_a_run_imports_mlflow_only_if_it_names_it(tmp_path):
    """In a new process, where a second run that names it has it too."""
    if "mlflow" not in NAMES:
        pytest.skip("mlflow is not installed")
    code = f"""
import os, sys
from pathlib import Path
from pods_rl.recipe import load_recipe
from pods_rl.training.tracking import tracking

for names in ("none", "mlflow"):
    with tracking(load_recipe("tiny-pods", {{"report_to": names}}), Path({str(tmp_path)!r}), writes=True):
        from trl.extras import profiling
        print("mlflow" in sys.modules, hasattr(profiling, "mlflow"))
print([name for name in os.environ if "MLFLOW" in name])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=clean)
    assert done.stdout.splitlines() == ["False False", "True True", "[]"], done.stderr
