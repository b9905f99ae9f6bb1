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
    rows = module("chat").questions(99)
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert len({*asked}) == len(rows) >= 2048 + 256
    for text, row in zip(asked, rows, strict=True):
        a, sign, b = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", text).groups()
        right = int(a) + int(b) if sign == "+" else int(a) - int(b)
        assert int(row["answer"]) == right <= 99
        assert right >= 1
