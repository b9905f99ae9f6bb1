"""Why rollouts were kept: against the rules themselves and brute force; what is left out of a page, and counts."""

from __future__ import annotations

import json
import math
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import write_rollouts, write_run

from pods_rl.report.arms import arms_from_runs
from pods_rl.report.difficulty import Tally
from pods_rl.report.explorer import Explorer
from pods_rl.report.groups import TEXT_LIMIT, Group, group_of
from pods_rl.report.ledger import ledger_page
from pods_rl.report.pages import island
from pods_rl.report.reasons import Reasons, Settings, ends_of, variance
from pods_rl.selection import select

NAN = math.nan


def test_ends_are_those_of_the_rule() -> None:
    """All groups of 6 rewards from three values: the rule's own choice, and the tie rule where several k fit."""
    groups = list(product([0.0, 0.5, 1.0], repeat=6))
    kept = select(torch.tensor(groups), 3).indices.tolist()
    for rewards, chosen in zip(groups, kept, strict=True):
        values = sorted(rewards[i] for i in chosen)
        every = sorted(rewards)
        fits = [k for k in range(4) if every[: 3 - k] + every[6 - k :] == values]
        best = max(fits, key=lambda k: (-abs(2 * k - 3), k))
        assert ends_of(rewards, values) == (best, 3 - best)


def test_every_rule_is_described_as_what_it_did() -> None:
    rewards = [0.1, 0.9, 0.5, 0.3, 0.7, 0.2]
    found = {}
    for rule in ("max_variance", "max_reward", "percentile", "random"):
        chosen = select(torch.tensor([rewards]), 2, rule, torch.Generator().manual_seed(0)).indices[0].tolist()
        reasons = Reasons(Settings(rule, 6, 2), rewards, [i in chosen for i in range(6)])
        found[rule] = reasons.lines()[0]
    assert found == {
        "max_variance": "max_variance kept the 1 highest and the 1 lowest of 6 rewards.",
        "max_reward": "max_reward kept the 2 highest of 6 rewards.",
        "percentile": "percentile kept 2 at evenly spaced quantiles of the rewards, of 6 rewards.",
        "random": "random kept 2 chosen at random, of 6 rewards.",
    }


def test_random_choice_has_on_average_the_variance_of_all() -> None:
    rewards = [0.1, 0.9, 0.5, 0.3, 0.9, 0.2]
    for m in (2, 3, 5):
        mean = np.mean([variance(chosen) for chosen in combinations(rewards, m)])
        assert mean == pytest.approx(variance(rewards))


@pytest.mark.parametrize(
    ("settings", "rewards", "kept", "more", "lines"),
    [
        (Settings("max_variance", 4, 4), [0, 1, 0, 1], "1111", {}, ["All 4 kept: no down-sampling."]),
        (
            Settings("max_variance", 4, 2),
            [1, 1, 1, 1],
            "1100",
            {},
            [
                "All rewards are equal: the first 2 were kept.",
                "Without spread every advantage is 0: this group teaches nothing.",
            ],
        ),
        (
            Settings("max_variance", 8, 2),
            [0, 1, 0, 1],
            "1100",
            {"stopped": "decided", "waves": 2},
            [
                "Generated 4 of 8 in 2 waves; decided: those left could not raise the variance of the best 2 enough.",
                "max_variance kept the 1 highest and the 1 lowest of 4 rewards.",
                "Variance of the kept rewards 0.500, of a random choice of 2 on average 0.333: 1.50 times.",
            ],
        ),
        (
            Settings("max_variance", 8, 2, dead_groups="refill"),
            [0, 0],
            "00",
            {"stopped": "gave up", "waves": 1},
            [
                "Generated 2 of 8 in 1 wave; given up: the first rewards were all equal.",
                "None kept: a further prompt was drawn in its place.",
            ],
        ),
        (
            Settings("max_variance", 6, 2, dead_groups="share"),
            [0, 0, 0, 1, 1, 1],
            "110110",
            {"drawn": True},
            [
                "Drawn in the place of a group without spread (dead_groups: refill).",
                "max_variance kept the 2 highest and the 2 lowest of 6 rewards.",
                "2 of these rows are places of groups without spread.",
                "Variance of the kept rewards 0.333, of a random choice of 4 on average 0.300: 1.11 times.",
            ],
        ),
        (
            Settings("max_variance", 4, 2),
            [0, NAN, 1, NAN],
            "1010",
            {},
            [
                "2 of 4 rollouts have no reward: kept only where scored ones are too few.",
                "max_variance kept the 1 highest and the 1 lowest of 2 rewards.",
                "Variance of the kept rewards 0.500, of a random choice of 2 on average 0.500: 1.00 times.",
            ],
        ),
        (Settings("", None, None), [0, 1, 2], "010", {}, ["The rule kept 1 of 3 rewards."]),
    ],
)
def test_lines(settings: Settings, rewards: list[float], kept: str, more: dict, lines: list[str]) -> None:
    assert Reasons(settings, rewards, [mark == "1" for mark in kept], **more).lines() == lines


def test_every_kept_and_dropped_rollout_has_its_reason() -> None:
    rewards = [1.0, 1, 0.5, 0, 0]
    reasons = Reasons(Settings("max_variance", 5, 2), rewards, [True, False, False, True, False])
    assert [reasons.of_rollout(r, k) for r, k in zip(rewards, reasons.kept, strict=True)] == [
        "one of the 1 highest",
        "equal to kept ones, later number",
        "between the kept ends",
        "one of the 1 lowest",
        "equal to kept ones, later number",
    ]
    assert reasons.of_rollout(NAN, kept=False) == "no reward"


# ------------------------------------------------------------------------------------------- what is counted


def rows(rewards: list[float], *, prompt: str = "p", text: str = "t", step: int = 1) -> list[dict]:
    return [
        {"step": step, "group": 0, "rollout": i, "prompt": prompt, "completion": text, "reward": r, "selected": i < 2}
        | {"reward/accuracy": r, "completion_tokens": 4}
        for i, r in enumerate(rewards)
    ]


def test_prompts_are_counted_over_all_their_groups() -> None:
    tally = Tally("pods")
    for prompt, rewards in (("a", [0.0, 0]), ("a", [0.0, 1]), ("b", [0.0, 0]), ("b", [0.0, NAN]), ("c", [1.0, 1, 1])):
        tally.add(group_of(rows(rewards, prompt=prompt), "pods", "seed-0", Settings()))
    assert tally.classes == {"dead": 1, "live": 1, "solved": 1}
    assert tally.groups == 5
    bins = tally.bins(0.0, 1.0)
    assert (sum(b.kept for b in bins), sum(b.dropped for b in bins)) == (9, 1)  # of 11, one has no reward
    assert (bins[0].kept, bins[-1].kept, bins[-1].dropped) == (6, 3, 1)


def test_what_ended_a_completion_is_said() -> None:
    group = group_of(rows([0.0, 1, 1]), "pods", "seed-0", Settings("max_variance", 3, 2, length=4))
    assert {r.reason.rpartition(" · ")[2] for r in group.rollouts} == {"length limit"}
    again = group_of(rows([0.0, 1, 1]), "pods", "seed-0", Settings("max_variance", 3, 2, length=5))
    assert {r.reason.rpartition(" · ")[2] for r in again.rollouts} == {"ended itself"}


def test_equal_rollouts_fold_and_others_do_not() -> None:
    group = group_of(rows([1.0, 0, 1, 0, 1, 0]), "pods", "seed-0", Settings())
    assert [(len(fold), sum(r.kept for r in fold)) for fold in group.folded] == [(3, 1), (3, 1)]
    assert len(group_of([*rows([1.0]), *rows([1.0], text="u")], "pods", "seed-0", Settings()).folded) == 2


# --------------------------------------------------------------------------------------------- how much is kept


def test_page_says_how_many_groups_it_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30)
    for step in range(1, 33):
        text = f"{step}<" * 400
        write_rollouts(path, step, n=8, m=2, random=np.random.default_rng(step), groups=1, text=text)
    arms = arms_from_runs([tmp_path], "accuracy")
    whole, part = ledger_page(arms), ledger_page(arms, data_mb=0.05)
    assert (whole.left_out, whole.rollouts, whole.total) == (0, 256, 32)
    assert part.total == 32
    assert 8 < part.left_out < 32
    assert part.rollouts == 8 * (32 - part.left_out)
    assert len(island("x", part.data)) < 0.06e6 < len(island("x", whole.data))
    shown = [group[2] for group in part.data["groups"] if group[-1] is not None]
    assert len(part.data["groups"]) == 32  # all can be counted
    assert max(np.diff([0, *shown, 33])) <= 8  # evenly over the run
    assert [tally.groups for tally in part.tallies] == [32]


def test_size_is_that_of_the_island() -> None:
    explorer = Explorer(10**9)
    for step in range(30):
        text = f"<b>é</b> & {step % 5}" * 20
        explorer.add(group_of(rows([0.0, 1, 0.5], step=step, text=text), "pods", "seed-0", Settings()), 0)
    size = len(island("x", explorer.data(["pods"])).encode())
    assert explorer.bytes == pytest.approx(size, rel=0.05)


def test_lines_of_a_megabyte_and_long_prompts_are_cut() -> None:
    prompt = "rules " * 1000 + "the question"
    group = group_of(rows([1.0], text="x" * 1_000_000, prompt=prompt), "pods", "seed-0", Settings())
    assert group.prompt.startswith("rules ")
    assert group.prompt.endswith("the question")
    assert len(group.prompt) < TEXT_LIMIT + 40
    assert group.rollouts[0].whole == "x" * TEXT_LIMIT + " … (998000 more characters)"


def test_island_ends_nowhere_within_its_data() -> None:
    hostile = ["</script>", "<!--<script>", "]]>", "a\u2028b\u2029c", "\u202e\x00\x1b", "&lt;"]
    groups: list[Group] = [group_of(rows([1.0], text=text, prompt=text), "pods", text, Settings()) for text in hostile]
    explorer = Explorer(10**6)
    for group in groups:
        explorer.add(group, 0)
    text = str(island("ledger-data", explorer.data(hostile)))
    inner = text.removeprefix('<script type="application/json" id="ledger-data">').removesuffix("</script>")
    assert not set(inner) & set("<>&\u2028\u2029")
    assert json.loads(inner)["arms"] == hostile
    assert "\\\\u202e\\\\x00\\\\x1b" in inner  # shown as text, with no effect


def test_refilled_groups_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "pods" / "seed-0", "pods", end=30, config={"dead_groups": "refill"})
    written = [
        row | {"group": g, "selected": g != 1 and row["selected"]} for g in range(3) for row in rows([0.0, 1, 1])
    ]
    (path / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(written), path / "rollouts" / "step-000001.parquet")
    why = [group.why[0] for group in ledger_page(arms_from_runs([tmp_path], "accuracy")).groups]
    assert why == [
        "max_variance kept the 1 highest and the 1 lowest of 3 rewards.",
        "None kept: a further prompt was drawn in its place.",
        "Drawn in the place of a group without spread (dead_groups: refill).",
    ]
