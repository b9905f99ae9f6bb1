"""Which arms make an ablation, and what the figures and tables of one show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import write_run

from pods_rl.report import build_report
from pods_rl.report.ablations import Ablation, find_ablations, setting_of
from pods_rl.report.analysis import analyse
from pods_rl.report.arms import Arm, arms_from_runs
from pods_rl.report.figures import roles_of
from pods_rl.report.line_plots import Line, Point, ablation_figure, curves_figure

STUDY = Path(__file__).parents[2] / "benchmarks" / "study.yaml"
BASE = {"num_generations": 16, "num_rollouts": 64, "rule": "max_variance", "advantages": "after"}
BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "learning_rate": 1e-5}


def families(configs: dict[str, dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Of each family, (value, arm)."""
    found = find_ablations([Arm(name, name, None, BASE | BATCH | config) for name, config in configs.items()])
    return {a.axis: [(value, arm.name) for value, arm in zip(a.values, a.arms, strict=True)] for a in found}


def test_the_study_s_arms_fall_into_the_paper_s_ablations() -> None:
    declared = yaml.safe_load(STUDY.read_text())
    base = {"rule": "max_variance", "advantages": "after", "gradient_accumulation_steps": 1, **declared["base"]}
    arms = [Arm(name, name, None, base | keys) for name, keys in declared["arms"].items()]
    found = {ablation.axis: ablation for ablation in find_ablations(arms)}

    def members(ablation: Ablation) -> list[str]:
        return [f"{value}: {arm.name}" for value, arm in zip(ablation.values, ablation.arms, strict=True)]

    assert {ablation.reference.name for ablation in found.values()} == {"pods-64-16"}
    assert members(found["n"]) == ["16 (GRPO): grpo-16", "32: pods-32-16", "64: pods-64-16", "128: pods-128-16"]
    m = ["2: pods-64-2", "4: pods-64-4", "8: pods-64-8", "16: pods-64-16", "64 (GRPO): grpo-ga-64"]
    assert members(found["m"]) == m  # rows a step follow m: still one prompt a step
    rules = ["max_variance", "max_reward", "random", "percentile"]
    assert list(found["rule"].values) == rules
    assert members(found["advantages"]) == ["after: pods-64-16", "before: before-64-16"]
    assert found["rule"].held == "n = 64, m = 16, advantages after"


def test_an_arm_with_another_learning_rate_or_batch_is_in_no_family() -> None:
    odd = {"pods": {}, "32": {"num_rollouts": 32}, "rate": {"num_rollouts": 128, "learning_rate": 1e-4}}
    odd |= {"prompts": {"num_generations": 8}}  # 16 rows with m = 8 are two prompts
    odd |= {"both": {"num_rollouts": 128, "num_generations": 8, "per_device_train_batch_size": 8}}
    assert families(odd) == {"n": [("32", "32"), ("64", "pods")]}


def test_memory_and_seeds_are_no_difference() -> None:
    own = {"seed": 4, "output_dir": "x", "rollout_batch_size": 32, "vllm_gpu_memory_utilization": 0.3}
    assert families({"pods": {}, "32": {"num_rollouts": 32} | own, "128": {"num_rollouts": 128}})["n"][0] == (
        "32",
        "32",
    )


def test_plain_grpo_has_no_rule() -> None:
    grpo = {"num_rollouts": None, "rule": "random", "advantages": "before"}
    found = families({"grpo": grpo, "pods": {}, "random": {"rule": "random"}})
    assert found == {
        "n": [("16 (GRPO)", "grpo"), ("64", "pods")],
        "rule": [("max_variance", "pods"), ("random", "random")],
    }


def test_two_arms_are_no_ablation_but_a_comparison() -> None:
    assert families({"grpo": {"num_rollouts": 16}, "pods": {}}) == {}


def test_arms_without_n_and_m_are_no_ablation() -> None:
    assert find_ablations([Arm(name, name, None, {"rule": name}) for name in "abc"]) == ()
    assert setting_of({"num_generations": "many"}) is None


def write_many(root: Path) -> Path:
    """Eight arms: the baseline, an n, an m and a rule family; ``random`` never comes near the others."""
    configs: dict[str, dict[str, Any]] = {"grpo": {}, "pods": {}}
    configs |= {f"pods-{n}": {"num_rollouts": n} for n in (32, 128)}
    configs |= {f"z-{m}": {"num_generations": m} for m in (8, 4, 2)}
    configs["random"] = {"rule": "random"}
    for arm, config in configs.items():
        for seed in (1, 2):
            rate = 0.0 if arm == "random" else 1.9 if arm == "z-2" else None
            write_run(root / arm / f"seed-{seed}", arm, seed, config=config, rate=rate)
    return root


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many"))


def test_a_crowded_figure_names_the_baseline_the_reference_and_the_best(many: Path) -> None:
    analysis = analyse(arms_from_runs([many], "accuracy"), baseline="grpo", metric="accuracy", resamples=20)
    roles = roles_of(analysis)
    assert roles["grpo"] == "baseline"
    assert roles["pods"] == "reference"
    assert roles["z-2"] == "arm"  # the soonest there
    assert sorted(roles.values()).count("other") == 3
    few = analyse(arms_from_runs([many], "accuracy")[:4], baseline="grpo", metric="accuracy", resamples=20)
    assert "other" not in roles_of(few).values()


def test_report_shows_every_family(many: Path, tmp_path: Path) -> None:
    report = build_report(many, tmp_path / "out", resamples=20)
    assert {"ablation-n", "ablation-m", "ablation-rule"} <= set(report.figures)
    text = report.html.read_text()
    for title in ("Rollouts generated (n)", "Rollouts kept (m)", "Selection rule", "7 other arms"):
        assert (title in text) == (title != "7 other arms")
    assert "Grey, means only: " in text
    assert "![accuracy against training time and at the end, by selection rule](figures/ablation-rule.png)" in (
        report.markdown.read_text().replace("\\", "")
    )


@pytest.mark.usefixtures("no_rendering")
def test_a_figure_that_a_later_report_lacks_is_taken_away(many: Path, tmp_path: Path) -> None:
    first = build_report(many, tmp_path, resamples=5)
    mine = tmp_path / "figures" / "mine.png"
    mine.write_bytes(b"")
    build_report([many / "grpo" / "seed-1", many / "pods" / "seed-1"], tmp_path, resamples=5)
    assert not first.figures["ablation-n"].exists()
    assert mine.exists()


# ---------------------------------------------------------------------------------------------- figures


def line(label: str, height: float, role: str = "arm") -> Line:
    scores = np.array([[0.2, 0.4, 0.5], [0.3, 0.4, 0.6]]) + height
    return Line(label, np.array([[0.0, 10.0, 20.0]] * 2), scores, role)  # type: ignore[arg-type]


def test_ablation_figure_draws_each_value_with_band_runs_and_interval() -> None:
    lines = [line("n = 16", 0.0), line("n = 64", 0.1, "reference")]
    finals = [Point("16", 0.55, 0.5, 0.6, np.array([0.5, 0.6])), Point("64", 0.65, np.nan, np.nan)]
    left, right = ablation_figure(lines, finals, metric="accuracy").axes
    assert len(left.collections) == 2  # a band each
    assert [len(container.lines[2]) for container in right.containers] == [1, 0]  # no interval, no bar
    assert [text.get_text() for text in right.get_xticklabels()] == ["16", "64"]
    (dots, _) = (artist for artist in right.lines if artist.get_alpha())
    np.testing.assert_allclose(dots.get_ydata(), [0.5, 0.6])


def test_other_arms_are_grey_share_an_entry_and_leave_the_axis_alone() -> None:
    lines = [line("grpo", 0.0, "baseline"), line("pods", 0.1), line("a", 0.05, "other"), line("far", 9.0, "other")]
    figure = curves_figure(lines)
    (axes,) = figure.axes
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo", "pods", "2 other arms"]
    assert axes.get_ylim()[1] < 1
    assert len(axes.collections) == 2
