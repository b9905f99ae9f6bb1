"""Waves, stops and the places of dead groups in the real trainer.

What the policy samples is replaced by `texts_by_key`: completions that depend on a rollout's key alone, as those of
`prompt_once_generation` do. All the rest is the real trainer.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from datasets import IterableDataset
from pods_rl.engines.trl.keeping import keep_rows
from trl import GRPOTrainer

from pods_rl import PODSConfig
from pods_rl.engines.trl.settings import check_rollouts
from pods_rl.errors import UserError
from pods_rl.rollouts.allocating import live
from pods_rl.rollouts.sampling import uniforms
from pods_rl.rollouts.stopping import ROULETTE

from .conftest import PROMPTS
from .test_equivalence import weights


@pytest.fixture(autouse=True)
def texts_by_key(monkeypatch):
    """Stands for the policy's sampling. Each prompt has a rate of digits that are right, from 0 to 1."""

    def generate(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        assert len(self._round.turns.keys) == len(prompt_ids)
        completions = []
        for key, ids in zip(self._round.turns.keys, prompt_ids, strict=True):
            rate = (sum(ids) % 5) / 4
            draw = random.Random(str(key))
            first = "9" if draw.random() < rate else draw.choice("0123456")
            text = first + "".join(draw.choice("0123456789") for _ in range(draw.randint(0, 6)))
            completions.append(self.processing_class(text)["input_ids"] + [self.eos_token_ids[0]])
        return completions, None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)


def right(completions, **_):
    return [float(text[0] == "9") for text in completions]


def short(completions, **_):
    """A shaped part: with many values."""
    return [len(text) / 100 for text in completions]


WAVES = {
    "num_rollouts": 12, "num_generations": 4, "per_device_train_batch_size": 16, "rollout_waves": [4, 2],
    "reward_range": [0.0, 1.0], "reward": right,
}  # fmt: skip
ALL_AT_ONCE = WAVES | {"rollout_waves": None, "reward_range": None}


def generations(trainer):
    """Trains; the record of every generation."""
    records, build = [], trainer._generate_and_score_completions

    def keep(inputs):
        batch = build(inputs)
        records.append(trainer.rollouts)
        return batch

    trainer._generate_and_score_completions = keep
    trainer.train()
    return records


def rows_of(record):
    """Prompt, completion and advantage of every trained row, in order."""
    n = record.rewards.size(1)
    place = {number: i for i, number in enumerate(record.numbers)}
    flat = (record.groups * n + record.kept).flatten().tolist()
    texts = [(record.prompts[place[row]], record.completions[place[row]]) for row in flat]
    return [(*text, advantage) for text, advantage in zip(texts, record.advantages.flatten().tolist(), strict=True)]


def count_of(record):
    """Rollouts generated of each group."""
    n = record.rewards.size(1)
    counted = Counter(number // n for number in record.numbers)
    return [counted[group] for group in range(len(record.rewards))]


@pytest.mark.parametrize("m", [4, 5])
def test_lossless_stops_keep_what_all_at_once_keeps(make_trainer, m):
    size = {"num_generations": m, "per_device_train_batch_size": 4 * m, "max_steps": 3}
    whole = make_trainer(**ALL_AT_ONCE | size)
    expected = generations(whole)
    stopped = make_trainer(**WAVES | size | {"rollout_waves": [m, 2]})
    found = generations(stopped)
    for one, other in zip(expected, found, strict=True):
        assert rows_of(one) == rows_of(other)
        assert torch.equal(one.kept, other.kept)
        there = ~other.rewards.isnan()
        assert torch.equal(one.rewards[there], other.rewards[there])
    counts = [count for record in found for count in count_of(record)]
    assert min(counts) < 12 == max(counts)
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(stopped)[name]), name


def test_the_policy_s_own_rollouts_are_those_of_all_at_once(make_trainer, monkeypatch):
    """Nothing is replaced here. Kernels of other batch sizes round differently, which changes no draw of this seed."""
    monkeypatch.undo()

    def odd(completions, **_):
        return [float(sum(map(ord, text)) % 4 == 0) for text in completions]

    (whole,) = generations(make_trainer(**ALL_AT_ONCE | {"reward": odd, "max_steps": 1}))
    (stopped,) = generations(make_trainer(**WAVES | {"reward": odd, "max_steps": 1}))
    assert [row[:2] for row in rows_of(whole)] == [row[:2] for row in rows_of(stopped)]
    texts = dict(zip(whole.numbers, whole.completions, strict=True))
    assert stopped.completions == [texts[number] for number in stopped.numbers]
    assert len(stopped.numbers) < len(whole.numbers)


def test_only_undecided_prompts_generate_and_each_rollout_is_scored_once(make_trainer):
    scored = []

    def reward(prompts, completions, **_):
        scored.append(list(zip(prompts, completions, strict=True)))
        return right(completions)

    trainer = make_trainer(**WAVES | {"reward": reward, "max_steps": 1})
    (record,) = generations(trainer)
    assert [len(wave) for wave in scored[:1]] == [16]
    assert all(len(wave) % 2 == 0 and len(wave) <= 8 for wave in scored[1:])
    assert [len(wave) for wave in scored] == sorted(map(len, scored), reverse=True)
    everything = sorted(pair for wave in scored for pair in wave)
    assert everything == sorted(zip(record.prompts, record.completions, strict=True))
    for rewards, stop, count in zip(record.rewards, record.stopped, count_of(record), strict=True):
        before = rewards[: count - 2] if count > 4 else rewards[:0]
        assert min((before == 1).sum(), (before == 0).sum()) < 2
        decided = min((rewards == 1).sum(), (rewards == 0).sum()) >= 2
        assert stop == ("full" if count == 12 else "decided")
        assert decided or stop == "full"


def test_the_metrics_count_one_generation(make_trainer):
    trainer = make_trainer(**WAVES | {"max_steps": 2})
    first, record = generations(trainer)
    logs = trainer.state.log_history[1]
    tokens = torch.tensor(record.completion_tokens).float()
    assert logs["completions/mean_length"] == pytest.approx(tokens.mean().item())
    assert (logs["completions/min_length"], logs["completions/max_length"]) == (tokens.min(), tokens.max())
    assert logs["completions/clipped_ratio"] == 0
    assert logs["completions/mean_terminated_length"] == pytest.approx(tokens.mean().item())
    assert logs["pods/tokens/generated"] == tokens.sum()
    assert logs["reward"] == pytest.approx(record.rewards.nanmean().item())
    assert logs["rewards/right/mean"] == logs["reward"]
    assert logs["pods/unscored_rollouts"] == 0
    assert logs["pods/waves/rollouts"] == len(record.numbers) / 4
    assert logs["pods/waves/decided"] == record.stopped.count("decided") / 4
    assert logs["pods/waves/gave_up"] == 0
    assert logs["pods/waves/count"] == 5 if 12 in count_of(record) else 4
    prompts = [
        sum(len(trainer.processing_class(text)["input_ids"]) for text in each.prompts) for each in (first, record)
    ]
    assert logs["num_tokens"] == sum(prompts) + tokens.sum() + sum(first.completion_tokens)
    assert not {key for key in make_trainer(**ALL_AT_ONCE)._metrics["train"] if "waves" in key}


def test_the_ledger_has_what_was_generated(make_trainer):
    trainer = make_trainer(**WAVES | {"max_steps": 1})
    (record,) = generations(trainer)
    columns = record.columns()
    pairs = list(zip(columns["group"], columns["rollout"], strict=True))
    assert pairs == [(group, i) for group, count in enumerate(count_of(record)) for i in range(count)]
    assert columns["wave"] == [1 if i < 4 else 2 + (i - 4) // 2 for _, i in pairs]
    assert columns["stopped"] == [record.stopped[group] for group, _ in pairs]
    assert sum(columns["selected"]) == 16
    assert [a is not None for a in columns["advantage"]] == columns["selected"]
    assert columns["reward/right"] == columns["reward"] == right(columns["completion"])
    assert "wave" not in generations(make_trainer(**ALL_AT_ONCE | {"max_steps": 1}))[0].columns()


def test_unscored_rollouts_are_none_that_are_missing(make_trainer):
    """None is scored: every group goes to its end, and the first generated ones fill its places."""
    trainer = make_trainer(**WAVES | {"reward": lambda completions, **_: [None] * len(completions), "max_steps": 1})
    (record,) = generations(trainer)
    assert record.kept.tolist() == [[0, 1, 2, 3]] * 4
    assert trainer.state.log_history[0]["pods/unscored_rollouts"] == 48

    def odd(completions, **_):
        return [None if len(text) % 2 else float(text[0] == "9") for text in completions]

    (one,) = generations(make_trainer(**ALL_AT_ONCE | {"reward": odd, "max_steps": 1}))
    (other,) = generations(make_trainer(**WAVES | {"reward": odd, "max_steps": 1}))
    assert torch.equal(one.kept, other.kept)


def test_a_graded_total_is_decided_by_the_answer(make_trainer):
    """98 % of totals differ, so their variance decides nothing; the answer's reward does."""
    graded = {"reward": [right, short], "reward_range": None, "answer_reward": "right", "max_steps": 2}
    records = generations(make_trainer(**WAVES | graded))
    stopped = Counter(stop for record in records for stop in record.stopped)
    assert stopped["decided"] > 0
    for record in records:
        assert record.rewards.nan_to_num(0).unique().numel() > 4
        for answers, stop, count in zip(by_group(record, 0), record.stopped, count_of(record), strict=True):
            assert (stop == "decided") == (min(answers.count(1.0), answers.count(0.0)) >= 2 and count < 12)
    by_total = generations(make_trainer(**WAVES | graded | {"reward_range": [0.0, 1.1]}))
    assert Counter(stop for record in by_total for stop in record.stopped)["decided"] == 0


def by_group(record, function):
    """A reward function's scores of each group."""
    n, groups = record.rewards.size(1), [[] for _ in record.rewards]
    for number, score in zip(record.numbers, record.rewards_per_func[:, function].tolist(), strict=True):
        groups[number // n].append(score)
    return groups


def test_a_certified_share_stops_earlier(make_trainer):
    sizes = []
    for share in (1.0, 0.7):
        records = generations(make_trainer(**WAVES | {"stop_variance": share, "max_steps": 3}))
        sizes.append(sum(len(record.numbers) for record in records))
    assert sizes[1] < sizes[0]


# -- giving up -------------------------------------------------------------------------------------------------------


def test_equal_groups_are_given_up_at_the_end_of_a_wave(make_trainer):
    trainer = make_trainer(**WAVES | {"give_up_after": 5, "reward_range": None, "max_steps": 2})
    for record in generations(trainer):
        for rewards, stop, count in zip(record.rewards, record.stopped, count_of(record), strict=True):
            equal = len(rewards[:6].unique()) == 1
            assert (stop, count) == (("gave up", 6) if equal else ("full", 12))
    assert trainer.state.log_history[0]["pods/waves/gave_up"] > 0


def test_survivors_of_the_roulette_have_a_weight(make_trainer):
    roulette = {"give_up_after": 4, "give_up_probability": 0.5, "reward_range": None, "max_steps": 6}
    trainer = make_trainer(**WAVES | roulette)
    weighted = 0
    for step, record in enumerate(generations(trainer)):
        for group, (rewards, stop, advantages) in enumerate(
            zip(record.rewards, record.stopped, record.advantages, strict=True)
        ):
            equal = len(rewards[:4].unique()) == 1
            draw = uniforms((3, step, 0, group, ROULETTE), 1)[0]
            assert stop == ("gave up" if equal and draw < 0.5 else "full")
            kept = rewards[record.kept[group]]
            expected = (kept - kept.mean()) / (kept.std() + 1e-4) * (2 if equal and stop == "full" else 1)
            torch.testing.assert_close(advantages, expected)
            weighted += int(equal and stop == "full" and len(kept.unique()) > 1)
    assert weighted > 0
    assert list(trainer._logs["advantages"])[-16:] == pytest.approx(record.advantages.flatten().tolist())


# -- the places of dead groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("waves", [True, False])
def test_dead_groups_are_refilled_with_further_prompts(make_trainer, waves):
    trainer = make_trainer(**(WAVES if waves else ALL_AT_ONCE) | {"dead_groups": "refill", "max_steps": 3})
    drawn = 0
    for step, record in enumerate(generations(trainer)):
        logs = trainer.state.log_history[step]
        groups = record.groups[:, 0]
        assert torch.equal(record.groups, groups.unsqueeze(1).expand(4, 4))
        assert live(record.rewards[groups]).float().mean() == logs["pods/refill/live_share"]
        for slot, group in enumerate(groups.tolist()):  # an original prompt stays where it is live
            assert bool(live(record.rewards[slot : slot + 1])) == (group == slot)
        assert len(record.rewards) - 4 == logs["pods/refill/prompts_drawn"]
        drawn += len(record.rewards) - 4
        kept = record.rewards[groups].gather(1, record.kept)
        torch.testing.assert_close(
            record.advantages, (kept - kept.mean(1, keepdim=True)) / (kept.std(1, keepdim=True) + 1e-4)
        )
    assert drawn > 0
    assert trainer._plan.prompts_drawn == drawn
    # TRL's table has the prompts that were trained, and the masks of its batch are those of their rows
    assert list(trainer._logs["prompt"])[-16:] == [prompt for prompt, *_ in rows_of(record)]


def test_a_refill_has_a_limit(make_trainer):
    never = {"reward": lambda completions, **_: [0.0] * len(completions)}
    trainer = make_trainer(**WAVES | never | {"dead_groups": "refill", "refill_limit": 2, "max_steps": 1})
    (record,) = generations(trainer)
    assert len(record.rewards) == 4 + 2 * 4
    assert record.groups[:, 0].tolist() == [8, 9, 10, 11]
    assert trainer.state.log_history[0]["pods/refill/live_share"] == 0
    assert trainer.state.log_history[0]["pods/skipped_step"] == 1


def test_refilling_looks_at_the_answer_and_not_at_shaped_rewards(make_trainer):
    graded = {"reward": [right, short], "reward_range": None, "dead_groups": "refill", "max_steps": 1}
    (by_total,) = generations(make_trainer(**WAVES | graded | {"reward_range": [0.0, 1.1]}))
    (by_answer,) = generations(make_trainer(**WAVES | graded | {"answer_reward": "right"}))
    assert len(by_total.rewards) == 4 < len(by_answer.rewards)


def test_a_refilled_run_resumes_with_the_same_prompts(make_trainer, tmp_path):
    settings = WAVES | {"dead_groups": "refill", "max_steps": 4, "lr_scheduler_type": "constant"}
    whole = make_trainer(**settings)
    expected = generations(whole)
    save = {"save_strategy": "steps", "save_steps": 2}
    begun = make_trainer(**settings | save | {"max_steps": 2})
    generations(begun)
    resumed = make_trainer(**settings | save)
    build, records = resumed._generate_and_score_completions, []
    resumed._generate_and_score_completions = lambda inputs: (build(inputs), records.append(resumed.rollouts))[0]
    resumed.train(resume_from_checkpoint=True)
    assert whole._plan.prompts_drawn > begun._plan.prompts_drawn > 0
    assert [rows_of(record) for record in records] == [rows_of(record) for record in expected[2:]]
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name


def test_an_open_generation_of_waves_is_saved(make_trainer):
    """Rows of two steps a generation: the record that is resumed from is the whole one's."""
    settings = WAVES | {
        "dead_groups": "refill", "steps_per_generation": 2, "per_device_train_batch_size": 8, "max_steps": 3,
        "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    trainer = make_trainer(**settings)
    trainer.train()
    resumed = make_trainer(**settings | {"max_steps": 4})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.rollouts.columns() == trainer.rollouts.columns()
    assert resumed.rollouts.step == 3


def test_places_of_dead_groups_are_shared(make_trainer):
    settings = ALL_AT_ONCE | {"dead_groups": "share", "max_steps": 4}
    trainer, shared = make_trainer(**settings), 0
    for record in generations(trainer):
        rows = Counter(record.groups.flatten().tolist())
        assert sum(rows.values()) == 16
        alive = live(record.rewards)
        shared += sum(rows[group] > 4 for group in range(4))
        for group in range(4):
            mine = record.groups == group
            rewards, advantages = record.rewards[group][record.kept[mine]], record.advantages[mine]
            if not alive[group]:
                assert rows[group] < 4 or alive.sum() == 0 or sum(rows[g] > 4 for g in range(4)) == 0
                assert not advantages.any()
                continue
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            torch.testing.assert_close(advantages, expected * 4 / rows[group])
            if rows[group] > 4:  # balanced, and no further than the rarer side allows
                assert (rewards == 1).sum() == (rewards == 0).sum()
    assert shared > 0
    assert list(trainer._logs["prompt"])[-16:] == [prompt for prompt, *_ in rows_of(record)]


def test_a_batch_of_live_groups_shares_nothing(make_trainer):
    def lively(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    runs = [
        generations(make_trainer(**ALL_AT_ONCE | {"reward": lively, "dead_groups": kind, "max_steps": 2}))
        for kind in ("keep", "share")
    ]
    for one, other in zip(*runs, strict=True):
        assert rows_of(one) == rows_of(other)


def test_rows_follow_the_rarer_reward(make_trainer):
    for record in generations(make_trainer(**ALL_AT_ONCE | {"rows_per_group": "auto", "max_steps": 3})):
        for rewards, kept, advantages in zip(record.rewards, record.kept, record.advantages, strict=True):
            chosen = rewards[kept]
            rarer = int(min((chosen == 1).sum(), (chosen == 0).sum()))
            used = advantages != 0
            assert used.sum() == 2 * rarer
            if rarer:
                assert (chosen[used] == 1).sum() == (chosen[used] == 0).sum() == rarer
                own = chosen[used]
                expected = (own - own.mean()) / (own.std() + 1e-4) * (4 / (2 * rarer))
                torch.testing.assert_close(advantages[used], expected)


def test_more_rows_of_the_commoner_reward_are_taken_from_all_rollouts(tmp_path):
    rewards = torch.tensor([[1.0] * 10 + [0.0] * 54])
    args = PODSConfig(
        str(tmp_path), num_generations=16, num_rollouts=64, per_device_train_batch_size=16, rows_per_group="auto",
        majority_rows=2.0, use_cpu=True, bf16=False,
    )  # fmt: skip
    kept = keep_rows(args, rewards, rewards, torch.tensor([0]))
    trained = rewards[0, kept.numbers[0]][kept.weights[0] != 0]
    assert (int(trained.sum()), len(trained)) == (5, 15)  # max_variance alone keeps 8 and 8


def test_different_completions_are_preferred(make_trainer, monkeypatch):
    def few(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        texts = ["9", "9", "9", "91", "0", "0", "0", "0", "01", "0", "0", "0"]
        ids = [self.processing_class(texts[key[-1]])["input_ids"] for key in self._round.turns.keys]
        return [[*row, self.eos_token_ids[0]] for row in ids], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", few)
    kept = {}
    for prefer in (False, True):
        (record,) = generations(make_trainer(**ALL_AT_ONCE | {"prefer_distinct": prefer, "max_steps": 1}))
        kept[prefer] = record.kept.tolist()
    assert kept == {False: [[0, 1, 4, 5]] * 4, True: [[0, 3, 4, 8]] * 4}


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_waves": [4]}, "needs something that stops a group: set reward_range"),
        ({"rollout_waves": [2], "answer_reward": "right"}, "the first of rollout_waves must be at least"),
        ({"rollout_waves": [4], "answer_reward": "right", "rule": "random"}, r"waves = \[4\] needs rule = max_"),
        ({"rollout_waves": [4], "answer_reward": "right", "advantages": "before"}, "needs advantages = after"),
        (
            {"rollout_waves": [4], "give_up_after": 4, "multi_objective_aggregation": "normalize_then_sum"},
            "needs multi_objective_aggregation = sum_then_normalize",
        ),
        ({"rollout_waves": [4], "give_up_after": 12}, "give_up_after = 12 must be less than num_rollouts = 12"),
        ({"rollout_waves": [4], "reward_range": [1.0, 0.0]}, "two finite numbers"),
        ({"give_up_after": 8}, "give_up_after = 8 needs rollout_waves"),
        ({"stop_variance": 0.5}, "stop_variance = 0.5 needs rollout_waves"),
        ({"dead_groups": "drop"}, "expected keep, share or refill"),
        ({"dead_groups": "share", "rule": "percentile"}, "dead_groups = share needs rule = max_variance"),
        ({"dead_groups": "share", "rows_per_group": "auto"}, "set one of them"),
        ({"rows_per_group": "auto", "advantages": "before"}, "rows_per_group = auto needs advantages = after"),
        ({"prefer_distinct": True, "rule": "max_reward"}, "prefer_distinct = true needs rule"),
        ({"dead_groups": "refill", "refill_limit": 0}, "refill_limit must be at least 1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        PODSConfig(
            str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4, num_rollouts=12,
            **settings,
        )  # fmt: skip


def test_a_recipe_refuses_the_same():
    with pytest.raises(UserError, match="needs rule = max_variance"):
        check_rollouts({"rollout_waves": [4], "rule": "random"})


def test_an_unknown_answer_and_a_stream_are_refused(make_trainer):
    with pytest.raises(UserError, match="answer_reward = wrong: expected one of the reward functions: right"):
        make_trainer(**WAVES | {"answer_reward": "wrong"})
    stream = IterableDataset.from_generator(lambda: ({"prompt": text} for text in PROMPTS))
    with pytest.raises(UserError, match="dead_groups = refill draws further prompts by their number"):
        make_trainer(**ALL_AT_ONCE | {"dead_groups": "refill", "train_dataset": stream})


def test_a_reward_outside_its_range_is_an_error(make_trainer):
    trainer = make_trainer(**WAVES | {"reward": lambda completions, **_: [2.0] * len(completions)})
    with pytest.raises(UserError, match="reward_range must hold every reward"):
        trainer.train()
