"""What the validation of `pods plan` says of runs whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import module

validation = module("validation")


def write_runs(place: Path, rates: dict[str, list[float]], end: float = 40.0) -> None:
    """Runs whose accuracy grows by a rate a second, up to 0.8."""
    for arm, of_seeds in rates.items():
        for seed, rate in enumerate(of_seeds, 1):
            run = place / arm / f"seed-{seed}"
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(json.dumps({"seed": seed}))
            (run / "status.json").write_text(json.dumps({"state": "finished"}))
            times = [4.0 * i for i in range(int(end / 4) + 1)]
            rows = [{"due": t, "seconds": t, "step": int(t), "accuracy": min(rate * t, 0.8)} for t in times]
            (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_ratio_is_that_of_the_seconds_to_the_threshold(tmp_path: Path) -> None:
    grid = {"16-16": 0.04, "32-16": 0.05, "64-16": 0.001, "16-8": 0.02, "32-8": 0.0475}
    write_runs(tmp_path, {arm: [rate] * 3 for arm, rate in (grid | {"planned": 0.04}).items()})
    rows = {row[2]: row for row in validation.table("mine", tmp_path, "planned", "16 -> 16, refill")}
    assert rows["16 -> 16"][1:4] == ["0.760", "16 -> 16", "19"]  # 0.95 x 0.8
    assert float(rows["32 -> 16"][3]) == pytest.approx(0.76 / 0.05, rel=0.01)
    assert rows["32 -> 16"][5:] == ["1", "1 to 1", "best of the grid"]
    assert rows["64 -> 16"][3:6] == ["never", "never to never", "never"]
    assert rows["planned"][5:] == ["1.25", "1.25 to 1.25", "recommended (16 -> 16, refill); misses the goal"]


def test_seeds_that_differ_widen_the_interval(tmp_path: Path) -> None:
    write_runs(tmp_path, {"16-16": [0.03, 0.04, 0.05], "32-16": [0.04, 0.04, 0.04]})
    rows = {row[2]: row for row in validation.table("mine", tmp_path, "32-16", "32 -> 16")}
    low, high = map(float, rows["16 -> 16"][4].split(" to "))
    assert low < float(rows["16 -> 16"][3]) < high
    assert rows["32 -> 16"][7].endswith("recommended (32 -> 16); within the goal")


def test_every_task_and_setting_is_a_recipe() -> None:
    """Words need their policy, which comes with the package or does not."""
    from pods_rl.recipe.reading import Origin
    from pods_rl.recipe.recipe import build_recipe

    for name, task in validation.TASKS.items():
        for keys in validation.GRID.values():
            if name.startswith("arithmetic"):
                plan = build_recipe({**validation.BASE, **task, **keys}, Origin("a test")).batch_plan()
                assert plan.prompts_per_step == 1
