"""Steps that a plan measures: each with its own setting, real work, and a policy that does not move."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from pods_rl.planning.costs import Costs, Measured
from pods_rl.planning.grid import Setting
from pods_rl.rollouts.allocating import Refill
from pods_rl.training.measuring import Meter
from pods_rl.training.recorder import TrainingClock
from pods_rl.training.replanning import Replanning

from .vllm_stand_in import LLM, Client, stand_ins


def measure(trainer, settings: list[Setting]) -> tuple[Meter, list[tuple[Setting, Measured]]]:
    found: list[tuple[Setting, Measured]] = []
    meter = Meter(trainer, iter(settings), lambda setting, measured: found.append((setting, measured)))
    meter.run()
    return meter, found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_does_the_work_of_its_own_setting(make_trainer, accumulation) -> None:
    rows = 8 // accumulation
    trainer = make_trainer(
        per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, learning_rate=0.0, max_steps=99
    )
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    settings = [Setting(4, 4), Setting(16, 4), Setting(8, 8), Setting(16, 4, (4, 12), 4), Setting(4, 4)]
    meter, found = measure(trainer, settings)
    assert [setting for setting, _ in found] == settings
    assert [step.work.rollouts for _, step in found][:3] == [8, 32, 8]
    assert [step.work.prompts for _, step in found][:3] == [2, 2, 1]
    assert all(0 < step.work.groups <= 8 // setting.num_generations for setting, step in found)
    assert all(step.work.groups <= step.work.rows <= 8 for _, step in found)
    assert all(step.generation > 0 and step.rest > 0 for _, step in found)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.state.global_step == len(settings)
    seen = meter.seen  # without the step of waves
    assert len(seen.answers) == len(seen.completion_tokens) == 8 + 32 + 8 + 8
    assert len(set(seen.prompts)) == 2 + 2 + 1 + 2


def test_a_generation_that_several_steps_train_is_measured_whole(make_trainer) -> None:
    trainer = make_trainer(
        per_device_train_batch_size=4, steps_per_generation=2, num_iterations=2, learning_rate=0.0, max_steps=99
    )
    meter, found = measure(trainer, [Setting(4, 4), Setting(8, 4)])
    assert [step.work.rollouts for _, step in found] == [8, 16]
    assert trainer.state.global_step == 8  # two generations of two batches, each trained twice
    assert meter.batches().rows == 8
    assert meter.batches().repeats == 2


def test_rewards_are_scaled_by_their_range_and_texts_are_told_apart(make_trainer) -> None:
    def half(completions: list[str], **_: object) -> list[float]:
        return [2.0 * (i % 2) for i in range(len(completions))]

    half.range = (0.0, 4.0)  # type: ignore[attr-defined]
    trainer = make_trainer(reward=half, answer_reward="half", learning_rate=0.0, max_steps=9)
    meter, _ = measure(trainer, [Setting(4, 4)])
    found = meter.seen.observed(*meter.answer_range())
    assert [one.answer for one in found] == [0.0, 0.5] * 4
    texts = [trainer.rollouts.completions[i] for i in range(8)]
    assert len({one.text for one in found}) == len(set(texts))


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_vllm_engines_are_measured_the_same_way(make_trainer, mode) -> None:
    with stand_ins():
        trainer = make_trainer(use_vllm=True, vllm_mode=mode, num_rollouts=16, learning_rate=0.0, max_steps=9)
        meter, found = measure(trainer, [Setting(4, 4), Setting(16, 4), Setting(8, 8)])
        (generator,) = Client.made + LLM.made
        asked = [
            sent["n"] * len(sent["prompts"]) if mode == "server" else len(sent[0])
            for sent in generator.sent("generate")
        ]
    assert asked == [step.work.rollouts for _, step in found] == [8, 32, 8]
    assert meter.batches().chunk is None


def test_prompts_drawn_for_dead_groups_go_on_through_plans_that_draw_none(make_trainer) -> None:
    trainer = make_trainer(dead_groups="refill")
    plan = trainer._plan
    first, second = plan.refill.prompts(3), Refill(trainer.args.seed, len(trainer.train_dataset)).prompts(5)[3:]
    plan.read(trainer, dead_groups="keep", num_rollouts=16)
    assert (plan.n, plan.refill, plan.prompts_drawn) == (16, None, 3)
    plan.read(trainer, dead_groups="refill")
    assert len(first) == 3
    assert plan.refill.prompts(2) == second


def test_a_run_plans_from_the_first_waves_of_its_latest_groups(make_trainer, tmp_path) -> None:
    def quarter(completions: list[str], **_: object) -> list[float]:
        return [float(i % 4 == 0) for i in range(len(completions))]

    trainer = make_trainer(reward=quarter, num_rollouts=16, rollout_waves=[4, 12], answer_reward="quarter", max_steps=2)
    keys, path = Setting(16, 4, (4, 12)).keys, tmp_path / "plan.json"
    modelled = [{"setting": Setting(8, 8).keys}, {"setting": keys}]
    path.write_text(json.dumps({"seconds": vars(Costs(rollout=1.0)), "recommended": keys, "modelled": modelled}))
    said: list[str] = []
    again = Replanning(trainer, path, 1, SimpleNamespace(clock=TrainingClock()), said.append)
    trainer.add_callback(again)
    trainer.train()
    groups = trainer.state.stateful_callbacks["pods_plan"]["groups"]
    assert [[answer for _, answer, *_ in group] for group in groups[:2]] == [[1.0, 0.0, 0.0, 0.0]] * 2  # of 16 each
    assert len(groups) == 2 * trainer.args.per_device_train_batch_size // 4
    assert len(said) == 1
    assert "step 1: planned again (modelled): 4 -> 4 instead of 16 -> 4, waves 4+12." in said[0]
    (entry,) = json.loads(path.read_text())["again"]
    assert (entry["step"], entry["label"], trainer.args.num_rollouts) == (1, "4 -> 4", 4)
