"""`pods plan` and `num_rollouts: auto` through the real commands, on a random policy that trains in a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

import pods_rl.planning.plan
import pods_rl.training.planning
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
        from dataclasses import replace

        plan = decide(candidates, timed, *rest, **facts)
        made.append(Setting(8, 2, (2, 6)))
        chosen = next(one for one in candidates if one.setting == made[-1])
        return replace(plan, chosen=chosen)

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
