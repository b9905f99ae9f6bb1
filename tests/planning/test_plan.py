"""The lines of `pods plan`, and which parts of a policy `pods doctor MODEL` reports as computed over trees."""

import pytest
import yaml

from pods_rl.experiment import build_experiment
from pods_rl.planning.measure import settings_to_measure
from pods_rl.planning.plan import Plan, Setting, Step
from pods_rl.planning.trees import describe_trees
from pods_rl.policies import tiny_policy_path
from pods_rl.recipe import load_recipe
from pods_rl.yaml_files import parse_yaml

from ..cli import pods
from ..prefix_tree.test_decoding import build

VALUES = load_recipe("tiny-pods").every_value()
GRPO, PROMPT, BATCH = settings_to_measure(Setting(2, 16, 8, "prompt"), 16, VALUES)[::2]
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
        return {setting.selection for setting in settings_to_measure(own, 16, VALUES | {"rule": rule})}

    assert selections(Setting(2, 16, 8, "prompt"), "max_reward") == {"none", "prompt"}
    assert selections(Setting(4, 8, 8, "batch"), "own.py:rule") == {"none", "batch"}


def test_a_selection_that_other_keys_contradict_is_not_measured() -> None:
    keys = {"multi_objective_aggregation": "normalize_then_sum", "mask_constant_groups": True, "exact_trl": True}
    for key, value in keys.items():
        settings = settings_to_measure(Setting(2, 16, 8, "prompt"), 16, VALUES | {key: value})
        assert [setting.selection for setting in settings] == ["none", "prompt", "prompt"]


def test_the_printed_experiment_has_the_keys_of_the_command_and_seeds_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr("pods_rl.planning.measure.plan_recipe", lambda recipe, seconds, show: PLAN)
    printed = pods("plan", "tiny-pods", "--learning_rate", "1e-3", "--seed", "7").stdout
    text = printed.partition("--config settings.yaml\n")[2]
    runs = build_experiment(*parse_yaml(text, "settings.yaml")).plan()
    assert [run.seed for run in runs[::3]] == [1, 2, 3]
    assert {run.recipe.values["learning_rate"] for run in runs} == {1e-3}


# -- prefix trees ------------------------------------------------------------------------------------------------------


def parts(model, **keys):
    return dict(describe_trees(load_recipe("tiny-pods", {"model_name_or_path": str(model), **keys})))


def test_the_shipped_policy_is_computed_over_trees():
    found = parts(tiny_policy_path())
    assert not found["generation"].startswith("rows")
    assert not found["update"].startswith("rows")


def test_a_part_that_is_computed_by_rows_says_why(tmp_path):
    build("mamba").save_pretrained(tmp_path)
    found = parts(tmp_path)
    assert not found["generation"].startswith("rows")
    assert found["update"].startswith("rows: ")


@pytest.mark.parametrize("keys", [{"prefix_tree": False}, {"exact_trl": True}])
def test_trees_that_are_turned_off_name_their_keys(keys):
    for value in parts(tiny_policy_path(), **keys).values():
        assert value.startswith("rows: ")
        assert "prefix_tree" in value
