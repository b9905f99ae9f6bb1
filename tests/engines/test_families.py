"""A step of each family that people train: generated and updated over trees, with the gradient of rows."""

from functools import cache

import pytest
import transformers
from packaging.version import Version

from tests.engines.families import ADAPTER, FAMILIES, IMAGES, PAGE, is_installed, table, train_step, with_table
from tests.numeric import assert_near
from tests.prefix_tree.newer import TREES_SINCE

pytestmark = pytest.mark.slow
IS_NEW = Version(transformers.__version__) >= Version(TREES_SINCE)  # older ones compute some families by rows
# Of a gradient. Recurrences round more often than attention: 3.4e-4 for Qwen3.5-MoE on one processor. A tree whose rows
# continue from 0.9 of the right state is apart by 0.75.
FLOAT32 = 5e-4
ON_TEXT = [name for name, family in FAMILIES.items() if family.kind != IMAGES]


@cache
def step(name):
    return train_step(FAMILIES[name], prefix_tree=True)


@pytest.mark.parametrize("name", ON_TEXT)
def test_a_step_is_computed_over_trees_with_the_gradient_of_rows(name):
    family = FAMILIES[name]
    if not is_installed(family):
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    try:
        over_trees = step(name)
    except (AttributeError, ValueError) as error:
        if IS_NEW:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot make or train it: {error}")
    if IS_NEW:
        assert over_trees.generation is None
        assert over_trees.update is None
    if family.kind != ADAPTER:  # with dropout only the expected gradients are equal
        rows = train_step(family, prefix_tree=False, rollouts=over_trees.rollouts)
        assert rows.update is not None
        assert_near(over_trees.gradient, rows.gradient, FLOAT32)


def test_the_table_of_the_page_is_what_a_step_does():
    missing = [name for name, family in FAMILIES.items() if not is_installed(family)]
    if missing or not IS_NEW:
        pytest.skip(f"the table is that of transformers {TREES_SINCE} or newer, and not of {transformers.__version__}")
    text = table({name: step(name) for name in FAMILIES})
    assert PAGE.read_text() == with_table(PAGE.read_text(), text)
