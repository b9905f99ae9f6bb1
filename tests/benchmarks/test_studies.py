"""The experiments of benchmarks/, how their learning rates are chosen, and the tables of their results."""

import statistics

import pytest

from pods_rl.experiment import load_experiment

from .. import read_csv
from . import BENCHMARKS, module, stand_in_for_chat

comparisons = module("comparisons")
pages = module("pages")
planner = module("planner")
# those of the batch study: test_batch_study.py
EXPERIMENTS = sorted(path.stem for path in BENCHMARKS.glob("*.yaml") if not path.stem.startswith("batch_"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_valid(name, tmp_path):
    """With one seed: the recipes of an arm differ in their seed alone."""
    keys = stand_in_for_chat(tmp_path) if name.startswith("chat") else {}
    assert load_experiment(BENCHMARKS / f"{name}.yaml", keys | {"seeds": 1}).plan()


@pytest.mark.parametrize(
    ("name", "file"), [*((study, "comparisons.csv") for study in comparisons.STUDIES), ("equal_rows_32", "quiet.csv")]
)
def test_the_committed_comparisons_are_those_of_the_committed_curves(name, file, tmp_path):
    """The last digit may differ with numpy's version."""
    rows = comparisons.compare_study(name, quiet=file == "quiet.csv")
    comparisons.write_csv(tmp_path / "again.csv", rows)
    committed = read_csv(comparisons.RESULTS / name / file)
    again = read_csv(tmp_path / "again.csv")
    assert len(again) == len(committed) > 0
    for new, old in zip(again, committed, strict=True):
        for key, text in old.items():
            if key in ("arm_value", "rival_value", "value", "low", "high"):
                assert float(new[key]) == pytest.approx(float(text), rel=1e-4, abs=1e-6, nan_ok=True), (new, old)
            else:
                assert new[key] == text, (new, old)


def test_the_pages_have_the_numbers_of_the_csv_files():
    known = pages.spreads()
    for path in pages.PAGES:
        page = path.read_text(encoding="utf-8")
        assert pages.written(page) == page, "python benchmarks/pages.py writes the tables"
        assert [*pages.unknown(page, known)] == [], path.name
        assert [*pages.without_a_file(page)] == [], path.name


def test_a_number_that_no_file_has_is_found():
    page = "## A study\n\nIt ends at 0.661 (arXiv 2504.13818), 0.5 [0.4, 0.6] up, with 89 MB ([CSV](results/a.csv)).\n"
    assert [*pages.without_a_file(page)] == ["0.661", "89 MB"]
    assert [*pages.unknown(page, [(0.5, 0.4, 0.6)])] == []
    assert [*pages.unknown(page, [(0.5, 0.4, 0.7)])] == ["0.5 [0.4, 0.6]"]


def test_disturbed_seeds_are_those_with_a_slow_speed_check_if_there_was_one():
    assert comparisons.noisy_seeds("batch_words_16") == {"grpo-2": {1010}, "random-4x16": {1010}}


def scores_by_arm(path):
    """The mean accuracy over time of each arm at each rate in a file of pilot runs, and the seeds of those runs."""
    runs: dict[str, dict[float, list[float]]] = {}
    seeds = set()
    for row in read_csv(path):
        at_rate = runs.setdefault(row["arm"], {}).setdefault(float(row["rate"]), [])
        at_rate.append(float(row["accuracy_over_time"]))
        seeds.add(int(row["seed"]))
    means = {arm: {rate: statistics.fmean(values) for rate, values in rates.items()} for arm, rates in runs.items()}
    return means, seeds


PILOTS = [path for path in sorted(comparisons.RESULTS.glob("*/rates*.csv")) if path.parent.name in EXPERIMENTS]


@pytest.mark.parametrize("file", PILOTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_study_has_the_rates_that_its_pilots_chose(file):
    experiment = load_experiment(BENCHMARKS / f"{file.parent.name}.yaml")
    scores, seeds = scores_by_arm(file)
    assert not seeds & {*experiment.seeds}
    checked = 0
    for arm, keys in experiment.arms.items():
        if arm not in scores:
            continue
        best = max(scores[arm], key=scores[arm].__getitem__)
        assert keys["learning_rate"] == best
        assert min(scores[arm]) < best < max(scores[arm])
        checked += 1
    assert checked >= 2


def test_the_planner_has_the_steps_that_the_studies_needed():
    committed = read_csv(planner.STUDIES_FILE)
    assert committed == [planner.rows_of(*comparison) for comparison in planner.COMPARISONS]
