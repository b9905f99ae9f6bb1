"""The GPU benchmark's plan, and all of it in miniature on a CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from pods_rl.recipe import Origin, build_recipe

from .. import DEADLINE
from . import BENCHMARKS, module

gpu_day = module("gpu_day")
gpu_runs = sys.modules["gpu_runs"]
NO_LIMIT = str(10 * DEADLINE)


@pytest.fixture(autouse=True)
def _beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# ------------------------------------------------------------------------------------------- the plan


def test_what_matters_most_fits_into_the_first_command_even_if_every_cell_is_late():
    cells = gpu_day.plan(gpu_day.DAY)
    assert len({(cell.part, cell.name) for cell in cells}) == len(cells)
    assert [cell.part for cell in cells] == sorted(cell.part for cell in cells)
    assert {cell.part for cell in cells} == set(gpu_day.PARTS)
    assert gpu_day.START + sum(cell.limit for cell in cells if cell.part <= 3) <= gpu_day.COMMAND < 600
    kinds = [(cell.part, cell.kind, cell.settings.get("arm"), cell.settings.get("way")) for cell in cells]
    small = gpu_day.plan(gpu_day.MINIATURE)
    assert kinds == [(cell.part, cell.kind, cell.settings.get("arm"), cell.settings.get("way")) for cell in small]


def test_seeds_take_turns_and_the_recipes_of_learning_are_right(tmp_path, monkeypatch):
    """The policy and the questions, which the first run writes, are replaced by files that are only there."""
    monkeypatch.chdir(tmp_path)
    (gpu_runs.CHAT / "policy").mkdir(parents=True)
    for name in ("train", "test"):
        (gpu_runs.CHAT / f"{name}.jsonl").touch()
    cells = [cell for cell in gpu_day.plan(gpu_day.DAY) if cell.kind == "learn"]
    recipes = [build_recipe(cell.settings["keys"], Origin("a cell")) for cell in cells]
    assert [recipe.values["seed"] for recipe in recipes] == [1, 1, 1, 2, 2, 2]
    for recipe in recipes:
        assert recipe.values["max_seconds"] == 60
        assert recipe.batch_plan().rows_per_generation == 32


# ------------------------------------------------------------------------------------------- in miniature


@pytest.mark.reliability  # every night: minutes
def test_the_complete_plan_on_a_cpu(tmp_path):
    """All parts through the command; a second command finds nothing to do."""
    words = ["--miniature", "--device", "cpu", "--seconds", NO_LIMIT, "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(BENCHMARKS / "gpu_day.py"), *words]
    printed = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        printed.append(done.stdout)
    assert printed[1] == ""
    machine, *lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert machine["torch"] == torch.__version__
    cells = gpu_day.plan(gpu_day.MINIATURE)
    assert [(line["part"], line["name"]) for line in lines] == [(cell.part, cell.name) for cell in cells]
    for cell, line in zip(cells, lines, strict=True):
        assert "failed" not in line, line
        assert f"{cell.part}  {cell.name}: {gpu_day.summary(line)}\n" in printed[0]
        if cell.kind == "step":
            assert line["trees"] is (cell.settings["arm"] == "tree"), line
            assert len(line["steps"]) == 2
            assert all(line["steps"][-1][phase] > 0 for phase in ("rollout", "reward", "update"))
            assert line["passes"] >= 1
            assert line["peaks"]["update"]["resident"] > 50 * 2**20
        if cell.kind == "generation":
            assert line["milliseconds_a_token"] > 0
        if cell.kind == "learn":
            assert line["ended"] == "finished"
            assert line["evaluations"][-1]["step"] == 2
    resumed = lines[-1]
    assert resumed["resumed"]
    assert resumed["killed_after_step"] < resumed["steps"] == 6
