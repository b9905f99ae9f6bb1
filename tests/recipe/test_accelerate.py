"""Accelerate configurations: what is refused before anything starts."""

from __future__ import annotations

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.recipe.catalog import check_accelerate


@pytest.mark.parametrize("options", [{"fsdp_version": 1}, {}])
def test_the_first_fsdp_is_refused(tmp_path, options):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": options}))
    with pytest.raises(UserError, match="fsdp_version: got 1, expected 2"):
        check_accelerate(tmp_path / "mine.yaml")
