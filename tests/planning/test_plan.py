"""What a plan says of measured steps."""

import pytest
import yaml

from pods_rl.planning.measure import settings_to_measure
from pods_rl.planning.plan import Plan, Setting, Step

GRPO, PROMPT, BATCH = settings_to_measure(Setting(2, 16, 8, "prompt"), 16, "max_variance")[::2]
PLAN = Plan(
    16,
    {
        GRPO: [Step(1.0, 0.5), Step(2.0, 0.25), Step(1.0, 0.0)],
        PROMPT: [Step(1.25, 0.0), Step(2.5, 0.0), Step(9.0, 0.0)],  # something else ran in the last round
        BATCH: [Step(0.9, 0.0), Step(1.8, 0.0), Step(0.9, 0.0)],
    },
    {"plan": "a test " * 20},
    {},
)


def test_the_cost_of_a_step_is_the_median_of_its_rounds() -> None:
    assert PLAN.cost(PROMPT) == (1.25, 1.25, 5.125)
    assert PLAN.cost(BATCH)[0] == pytest.approx(0.9)


def test_the_experiment_has_the_keys_of_each_setting() -> None:
    experiment = yaml.safe_load("\n".join(PLAN.experiment("tiny-pods")))
    assert experiment["base"] == "tiny-pods"
    assert experiment["arms"][experiment["baseline"]] == GRPO.keys
    assert list(experiment["arms"].values()) == [setting.keys for setting in PLAN.steps]


def test_a_rule_of_one_selection_is_measured_with_it_alone() -> None:
    def selections(own: Setting, rule: object) -> set[str]:
        return {setting.selection for setting in settings_to_measure(own, 16, rule)}

    assert selections(Setting(2, 16, 8, "prompt"), "max_reward") == {"none", "prompt"}
    assert selections(Setting(4, 8, 8, "batch"), "own.py:rule") == {"none", "batch"}
