"""The trainer over a small random model that the engine's own tests use."""

from pathlib import Path

import pytest

from ..engines.conftest import dataset, make_trainer, random_model, tokenizer

__all__ = ["dataset", "make_trainer", "random_model", "tokenizer"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as slow: they start processes, kill them and fill disks."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
