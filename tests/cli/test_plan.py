"""`pods plan` and `num_rollouts: auto` through the real commands, on a random policy that trains in a second."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

import pods_rl.planning.plan
import pods_rl.training.planning
import pods_rl.training.replanning
from pods_rl.errors import UserError
from pods_rl.planning.grid import PLANNED, Setting, plain_grpo
from pods_rl.recipe import load_recipe
from pods_rl.recipe.recipe import changed_keys, checkpoint_keys
from pods_rl.runs import Run
from pods_rl.training.planning import settings_that_fit

from . import pods
from .test_whole_run import place  # noqa: F401  (a fixture)


@pytest.fixture
def quick(monkeypatch):
    """Few simulated steps, and few rounds of real ones."""
    monkeypatch.setattr(pods_rl.planning.plan, "_STEPS", 20)
    monkeypatch.setattr(pods_rl.planning.plan, "_FEW_STEPS", 10)
    monkeypatch.setattr(pods_rl.training.planning, "_MOST", 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_is_measured_printed_drawn_and_written(place, quick):  # noqa: F811
    done = pods("plan", "r.yaml", "--seconds", "1", "--write", "planned.yaml", "--figure", "plan.svg")
    assert max(map(len, done.output.splitlines())) <= 80
    for part in ("pass rates", "Modelled: GRPO", "Timed: GRPO", "Recommended: ", "pods train --config planned.yaml"):
        assert part in done.output
    written = yaml.safe_load(Path("planned.yaml").read_text())
    assert {key: written[key] for key in PLANNED} == Setting.of(written).keys
    assert {**written, "num_rollouts": 4} == {
        **yaml.safe_load(Path("r.yaml").read_text()),
        **written,
        "num_rollouts": 4,
    }
    assert load_recipe("planned.yaml").values["num_rollouts"] == written["num_rollouts"]
    assert "<svg" in Path("plan.svg").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_auto_plans_before_training_and_a_resumed_run_keeps_its_plan(place, quick, monkeypatch):  # noqa: F811
    recipe = yaml.safe_load(Path("r.yaml").read_text()) | {"num_rollouts": "auto"}
    Path("auto.yaml").write_text(yaml.safe_dump(recipe))
    made: list[Setting] = []
    decide = pods_rl.planning.plan.decide

    def choose(candidates, timed, *rest, **facts):
        """Recommend waves, whatever this machine's times say."""
        plan = decide(candidates, timed, *rest, **facts)
        made.append(Setting(8, 2, (2, 6)))
        chosen = next(one for one in candidates if one.setting == made[-1])
        return dataclasses.replace(plan, chosen=chosen)

    monkeypatch.setattr(pods_rl.planning.plan, "decide", choose)
    pods("train", "--config", "auto.yaml", "--output", "run")
    run = Run.open("run")
    assert run.state == "finished"
    assert (run.config["num_rollouts"], run.config["rollout_waves"]) == (8, [2, 6])
    assert json.loads(Path("run/plan.json").read_text())["recommended"] == made[0].keys
    pods("train", "--config", "auto.yaml", "--output", "run", "--resume", "--max_steps", "4")
    assert [row["step"] for row in Run.open("run").metrics] == [1, 2, 3, 4]
    assert Run.open("run").config["num_rollouts"] == 8
    assert len(made) == 1  # not planned again
    Path("planned.yaml").write_text(yaml.safe_dump(recipe | made[0].keys | {"max_steps": 4}))
    pods("train", "--config", "planned.yaml", "--output", "again")
    same = ("step", "reward", "loss", "grad_norm", "num_tokens")  # planning left no trace
    assert [[row[name] for name in same] for row in Run.open("again").metrics] == [
        [row[name] for name in same] for row in Run.open("run").metrics
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_plans_again_and_a_resumed_one_plans_as_the_whole_run(place, quick, monkeypatch):  # noqa: F811
    """Each plan here depends on every rollout that it saw, so a resumed run must have seen the same."""
    recipe = yaml.safe_load(Path("r.yaml").read_text())
    recipe |= {"num_rollouts": "auto", "plan_every": 2, "max_steps": 7, "save_steps": 3}
    Path("auto.yaml").write_text(yaml.safe_dump(recipe))
    decide = pods_rl.planning.plan.decide

    def choose(candidates, timed, pool, *rest, **facts):
        plan = decide(candidates, timed, pool, *rest, **facts)
        seen = int(pool.texts_R.sum()) + len(pool.texts_R)
        own = [one for one in candidates if one.setting.num_generations == 2]
        return dataclasses.replace(plan, chosen=own[seen % len(own)])

    for module in (pods_rl.planning.plan, pods_rl.training.replanning):
        monkeypatch.setattr(module, "decide", choose)
    done = pods("train", "--config", "auto.yaml", "--output", "run")
    whole = Run.open("run")
    assert [one["step"] for one in whole.plan["again"]] == [2, 4, 6]
    chosen = [whole.plan["recommended"], *(one["recommended"] for one in whole.plan["again"])]
    assert len({str(keys) for keys in chosen}) > 2
    assert {keys["num_generations"] for keys in chosen} == {2}
    assert "step 4: planned again (modelled)" in done.output
    assert (whole.config["num_rollouts"], whole.config["num_generations"]) == ("auto", 2)
    generated = {
        step: Counter(pq.read_table(path)["group"].to_pylist()).most_common(1)[0][1]
        for step, path in enumerate(whole.rollout_files(), 1)
    }
    for step, most in generated.items():  # waves may generate fewer
        assert most <= chosen[(step - 1) // 2]["num_rollouts"]
    assert any(most > 2 for most in generated.values())

    shutil.copytree("run", "again")
    for path in ("checkpoint-6", "checkpoint-7", "final"):
        shutil.rmtree(Path("again/checkpoints", path))
    resumed = pods("train", "--output", "again", "--resume")
    assert "resumes from checkpoint-3" in resumed.output
    again = Run.open("again")
    assert again.plan == whole.plan
    timing = ("seconds", "elapsed", "pods/seconds", "num_input", "step_time", "train_")
    first, second = (
        [{name: value for name, value in row.items() if not name.startswith(timing)} for row in run.metrics]
        for run in (whole, again)
    )
    assert first == second
    Path("again/plan.json").unlink()
    with pytest.raises(UserError, match=r"plan.json is missing or damaged"):
        pods("train", "--output", "again", "--resume", "--max_steps", "8")


def test_what_does_not_fit_into_memory_is_left_out_and_said(monkeypatch):
    recipe = load_recipe("tiny-pods")
    everything, silence = settings_that_fit(recipe)
    monkeypatch.setattr(pods_rl.training.planning, "_memory", lambda *_, **__: 40e6)
    fitting, notes = settings_that_fit(recipe)
    assert silence == []
    assert max(setting.num_rollouts for setting in everything) == 128
    assert max(setting.num_rollouts for setting in fitting) < 128
    assert f"{len(everything) - len(fitting)} settings are left out" in notes[0]
    monkeypatch.setattr(pods_rl.training.planning, "_memory", lambda *_, **__: 1.0)
    assert settings_that_fit(recipe)[0] == [plain_grpo(recipe.values)]


def ledger(path: Path, rates: list[float]) -> Path:
    draw = random.Random(0)
    rows = [
        {"prompt": f"p{i}", "score": float(draw.random() < rate), "output": f"{i} {k}"}
        for i, rate in enumerate(rates)
        for k in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_ledger_is_planned_without_measuring(tmp_path, quick):
    hard = ledger(tmp_path / "hard.jsonl", [0.02, 0.05, 0.1] * 8)
    words = ["plan", "--rollouts", hard, "--reward-key", "score", "--prompts", "4", "-m", "8"]
    cheap = pods(*words, "--generate-seconds", "5", "0.001", "--update-seconds", "0.5", "--write", tmp_path / "p.yaml")
    assert "Timed" not in cheap.output
    assert "24 sampled, 768 rollouts" in cheap.output
    assert yaml.safe_load((tmp_path / "p.yaml").read_text())["num_rollouts"] > 8
    dear = pods(*words, "--generate-seconds", "0.1", "9", "--update-seconds", "0")
    assert "keep GRPO" in dear.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "No recipe: name one"),
        (["plan", "tiny-pods", "--figure", "plan.pdf"], "ends in .svg or .png"),
        (["plan", "tiny-pods", "--write", "no/where.yaml"], "its folder does not exist"),
        (["plan", "--rollouts", "x.jsonl"], "needs prices"),
        (["train", "tiny-pods", "--plan_every", "9"], "set num_rollouts: auto, or unset plan_every"),
        (["train", "tiny-pods", "--num_rollouts", "auto", "--plan_every", "0"], "plan_every = 0: expected at least 1"),
        (["train", "tiny-pods", "--num_rollouts", "autos"], "expected a whole number or auto or null"),
    ],
)
def test_mistakes_are_told(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        pods(*words)


def test_auto_is_a_value_of_num_rollouts_and_its_checkpoints_are_those_of_any_plan():
    auto = load_recipe("tiny-pods", {"num_rollouts": "auto"})
    assert auto.values["num_rollouts"] == "auto"
    assert auto.batch_plan().is_plain_grpo
    assert load_recipe("tiny-pods", {"num_rollouts": "64"}).values["num_rollouts"] == 64
    planned = load_recipe("tiny-pods", {"num_rollouts": "32", "rollout_waves": "[16, 16]"})
    assert changed_keys(checkpoint_keys(planned.values), auto.values) == []
    other = load_recipe("tiny-pods", {"num_rollouts": "32", "learning_rate": "1"})
    assert [line.split()[0] for line in changed_keys(checkpoint_keys(other.values), auto.values)] == ["learning_rate"]
    assert "planned before training" in pods("train", "tiny-pods", "--num_rollouts", "auto", "--dry-run").output
    assert "pods plan tiny-pods" in pods("doctor", "tiny-pods").output
