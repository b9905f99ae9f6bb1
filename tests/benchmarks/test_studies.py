"""The experiments of benchmarks/: their files are valid, and their studies name arms that they have."""

from __future__ import annotations

import re

import pytest

from pods_rl.experiment import load_experiment

from . import BENCHMARKS, module

study = module("study")


@pytest.mark.parametrize("name", study.STUDIES)
def test_a_study_names_arms_of_its_experiment(name):
    one = study.STUDIES[name]
    experiment = load_experiment(BENCHMARKS / f"{one.config}.yaml")
    named = {*one.baselines, *one.headline, *(arm for claim in one.claims for arm in claim[1:])}
    assert named <= {*experiment.arms}


def test_the_questions_of_the_chat_study():
    rows = module("chat").questions()
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert len({*asked}) == len(rows) == 2048 + 256
    for text, row in zip(asked, rows, strict=True):
        numbers = [int(number) for number in re.fullmatch(r"Which is the largest: (.+)\?", text)[1].split(", ")]
        assert len(numbers) == 4
        assert int(row["answer"]) == max(numbers)
    assert [turn["content"] for turn in rows[0]["prompt"][1:4:2]] == [
        f"<answer>{max(map(int, re.findall(r'[0-9]+', turn['content'])))}</answer>" for turn in rows[0]["prompt"][0:3:2]
    ]
