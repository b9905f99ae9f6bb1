"""The study of selection over the batch: its cells, the rule that fills its arms, its control and its intervals."""

import doctest
import math

import numpy as np
import pytest
import torch

from pods_rl.experiment import load_experiment
from pods_rl.report.statistics import Curve
from pods_rl.selection import select_batch
from pods_rl.selection.batch import best_sizes
from pods_rl.selection.rules import max_variance

from . import BENCHMARKS, module, stand_in_for_chat

batch_controls = module("batch_controls")
batch_study = module("batch_study")
pooled = module("pooled")
quickstart = module("quickstart")
CELLS = batch_study.cells()


@pytest.mark.parametrize("benchmark", [batch_controls, batch_study, pooled])
def test_the_examples_of_docstrings_run(benchmark):
    assert doctest.testmod(benchmark).failed == 0


# -- the cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_every_arm_that_a_cell_may_have_is_a_valid_recipe_of_its_rows(cell, tmp_path, monkeypatch):
    monkeypatch.chdir(BENCHMARKS.parent)  # where the rule of a control is found
    monkeypatch.syspath_prepend(BENCHMARKS.parent)
    keys = stand_in_for_chat(tmp_path) if cell.task == "chat" else {}
    arms = dict.fromkeys(cell.first_arms)
    for group in cell.candidates["grpo"]:
        for shape in cell.candidates["batch"]:
            arms |= dict.fromkeys(cell.following({"grpo": group, "batch": shape}))
    for run in cell.experiment(arms, max_seconds=1, **keys).plan():
        plan = run.recipe.batch_plan()
        kind, _, shape = run.arm.partition("-")
        prompts = plan.prompts_per_generation
        assert kind == "all" or plan.rows_per_generation == cell.rows
        if "x" in shape:
            assert shape == f"{prompts}x{plan.num_rollouts}"
            assert prompts * plan.num_rollouts > cell.rows


def test_no_seed_is_used_twice():
    seeds = []
    for cell in CELLS.values():
        seeds += [*range(cell.seeds, cell.seeds + cell.count), *cell.pilot_seeds]
    for file in BENCHMARKS.glob("*.yaml"):
        if file.name.startswith("batch_"):
            continue
        seeds += {*load_experiment(file).seeds}
    of_study = [seed for seed in seeds if seed > 1000]
    assert len(of_study) == len({*of_study})
    assert max(seeds) < quickstart.FIRST_SEED


def test_a_committed_experiment_is_what_its_pilot_runs_choose():
    for cell in CELLS.values():
        if cell.file.exists():
            rows = batch_study.read_rows(cell.results / "rates.csv")
            assert cell.file.read_text(encoding="utf-8") == cell.final_text(rows)


# -- the rule that fills the arms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of_rates",
    [
        {1e-4: {1: 0.1, 2: 0.1}, 2e-4: {1: 0.2, 2: 0.2}, 4e-4: {1: 0.3, 2: 0.3}},  # the best is the highest tried
        {1e-4: {1: 0.1, 2: 0.1}, 2e-4: {1: 0.2}, 4e-4: {1: 0.1, 2: 0.1}},  # a seed is missing
    ],
)
def test_a_search_that_has_not_ended_chooses_no_rate(of_rates):
    rows = []
    for rate, of_seeds in of_rates.items():
        for seed, score in of_seeds.items():
            rows.append({"arm": "a", "rate": str(rate), "seed": str(seed), "accuracy_over_time": str(score)})
    with pytest.raises(SystemExit):
        batch_study.best_rates(rows, [1, 2])


# -- the control ----------------------------------------------------------------------------------------------------

REWARDS = torch.tensor([[1.0, 0, 0, 1, 0.5, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0], [0.2, 0, 0, 0, 0, 0]])


def test_shuffled_sizes_are_those_of_the_batch_in_random_order_with_the_rows_of_the_paper():
    sizes = best_sizes(REWARDS, 8)
    total = torch.zeros(len(REWARDS))
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        kept = select_batch(REWARDS, 8, batch_controls.shuffled_sizes, generator=generator)
        assert kept.sizes.sort().values.equal(sizes.sort().values)
        for prompt, size in enumerate(kept.sizes.tolist()):
            if size:
                expected = max_variance(REWARDS[prompt : prompt + 1], size)[0]
                assert kept.mask()[prompt].nonzero().squeeze(1).equal(expected)
        total += kept.sizes
    # the standard error of a mean size is 0.2, and the batch gives no row to the second prompt
    assert sizes[1] == 0
    assert (total / 150).tolist() == pytest.approx([2.0] * 4, abs=0.6)


# -- the intervals --------------------------------------------------------------------------------------------------


def test_the_mean_over_cells_is_covered_as_often_as_stated():
    """Cells of different size of effect, noise and number of seeds."""
    rng = np.random.default_rng(1)
    truth = [0.0, 0.05, 0.1, 0.02]
    noise = [0.02, 0.08, 0.05, 0.2]
    seeds = [12, 12, 8, 12]
    covered = 0
    for _ in range(2000):
        estimates = []
        for mean, deviation, count in zip(truth, noise, seeds, strict=True):
            draw = rng.normal(mean, deviation, count)
            estimates.append(pooled.Estimate(draw.mean(), draw.var(ddof=1) / count, count - 1))
        _, low, high = pooled.mean_estimate(estimates)
        covered += low <= np.mean(truth) <= high
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)  # its standard error is 0.005


def simulated(rng, rate, checkpoints=6):
    """Twelve runs whose accuracy rises along a line, with a slope that varies by run, and noisy evaluations."""
    times = np.arange(checkpoints) * 8.0
    slopes = rng.normal(rate, 0.15 * rate, (12, 1))
    scores = 0.1 + slopes * times + rng.normal(0, 0.03, (12, checkpoints))
    names = tuple(map(str, range(12)))
    return Curve(names, times, np.broadcast_to(times, scores.shape), scores, np.full(scores.shape, math.nan))


def test_the_mean_speedup_over_cells_is_covered_as_often_as_stated():
    """Two cells; the mean curves cross one half at times with a known ratio."""
    rng = np.random.default_rng(2)
    ratios = (1.2, 1.5)
    draws = 200
    covered = 0
    for _ in range(draws):
        estimates = [
            pooled.jackknife(pooled.log_times, simulated(rng, 0.012 * ratio), simulated(rng, 0.012)) for ratio in ratios
        ]
        _, low, high = pooled.mean_estimate(estimates)
        covered += low <= np.mean(np.log(ratios)) <= high
    assert covered / draws == pytest.approx(0.95, abs=0.05)


def test_the_estimates_of_a_cell_are_those_of_the_tables():
    """On the curves of an earlier study, whose comparisons have the same numbers."""
    folder = pooled.comparisons.RESULTS / "equal_rows_16"
    arms = pooled.comparisons.read_evaluations(folder / "curves.csv")
    found = pooled.compare(arms["pods-16-4"], arms["grpo-16"])
    table = {}
    for row in batch_study.read_rows(folder / "comparisons.csv"):
        if (row["arm"], row["rival"]) == ("pods-16-4", "grpo-16"):
            table[row["measure"]] = float(row["value"])
    assert found["accuracy over time"].value == pytest.approx(table["accuracy over time"], rel=1e-4)
    for measure, name in (("seconds", "seconds to 0.5"), ("steps", "steps to 0.5"), ("seconds a step",) * 2):
        assert math.exp(found[measure].value) == pytest.approx(table[name], rel=1e-4)


def test_an_arm_without_the_target_has_no_ratio_and_is_not_pooled():
    arm = simulated(np.random.default_rng(4), 0.014)
    low = simulated(np.random.default_rng(4), 0.001)
    estimate = pooled.jackknife(pooled.log_times, arm, low)
    assert math.isnan(estimate.value)
    known = pooled.Estimate(math.log(2.0), 0.01, 11)
    cells = {name: {("grpo", "steps"): found} for name, found in {"a": estimate, "b": known, "c": known}.items()}
    rows = pooled.pool(cells)
    assert [(row["cells"], row["value"]) for row in rows] == [(2, pytest.approx(2.0))]
    assert pooled.pool({"b": cells["b"]}) == []


def test_the_prices_of_the_gpu_are_those_of_the_page():
    assert pooled.gpu_prices() == pytest.approx((1.09, 1.78), abs=0.005)
    assert pooled.gpu_price("batch-8x8", 16) == pooled.gpu_price("pods-16-4", 16) == pooled.gpu_prices()[0]
    assert pooled.gpu_price("all-8x8", 16) == pooled.gpu_prices()[1]
    assert pooled.gpu_price("batch-4x8", 16) == pytest.approx(1.03, abs=0.002)  # a third of the way from 1 to 1.09
    assert pooled.gpu_price("grpo-8", 16) == 1


def test_a_sentence_counts_if_it_is_settled_in_favour_of_the_arm(tmp_path):
    files = []
    for number, (gap, settled) in enumerate([(0.1, "true"), (-0.1, "true"), (0.1, "false")]):
        file = tmp_path / f"{number}.csv"
        head = "arm,other,difference,settled,over_time,over_time_settled,speedup,speedup_settled\n"
        file.write_text(f"{head}batch,grpo,{gap},{settled},{gap},true,,false\n")
        files.append(file)
    (counts,) = quickstart.settled_pairs(files).values()
    assert counts == {"settled": 1, "over_time_settled": 2, "speedup_settled": 0}
