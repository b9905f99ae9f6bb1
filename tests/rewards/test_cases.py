"""Grading against labels: 200 (completion, gold answer, label) cases, labelled by hand before any grader saw them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pods_rl.rewards import get_reward

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
DOCUMENTED = {("<think>Let us see.</think>\n<answer>eighteen</answer>", "18")}  # docs/rewards.md


@pytest.fixture(scope="module")
def disagreements():
    found = []
    for name in sorted({case["reward"] for case in CASES}):
        cases = [case for case in CASES if case["reward"] == name]
        scores = get_reward(name).batch([case["completion"] for case in cases], [case["gold"] for case in cases])
        found += [case for case, score in zip(cases, scores, strict=True) if (score >= 1) != bool(case["label"])]
    return found


def test_the_cases_are_two_hundred_different_ones_of_either_label():
    assert len({(case["completion"], case["gold"]) for case in CASES}) == len(CASES) == 200
    labels = Counter(case["label"] for case in CASES)
    assert labels[0] >= 60
    assert labels[1] >= 100
    assert Counter(case["reward"] for case in CASES) == {"accuracy": 160, "choice": 22, "equation": 18}


def test_grading_agrees_with_at_least_199_of_200_labels(disagreements):
    print(f"{len(CASES) - len(disagreements)} of {len(CASES)} labels agree")
    assert len(disagreements) <= 0.005 * len(CASES), disagreements


def test_each_disagreement_is_documented(disagreements):
    assert {(case["completion"], case["gold"]) for case in disagreements} == DOCUMENTED
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for completion, _ in DOCUMENTED:
        assert completion.partition("<answer>")[2].removesuffix("</answer>") in text
