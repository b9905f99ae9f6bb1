"""Accelerate configurations: what is refused before anything starts."""

from __future__ import annotations

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.recipe import catalog
from pods_rl.recipe.catalog import accelerate_configs, check_accelerate


@pytest.mark.parametrize("options", [{"fsdp_version": 1}, {}])
def test_the_first_fsdp_is_refused(tmp_path, options):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": options}))
    with pytest.raises(UserError, match="fsdp_version: got 1, expected 2"):
        check_accelerate(tmp_path / "mine.yaml", on_cpu=False)


def test_a_configuration_that_cannot_run_here_is_refused(monkeypatch):
    shipped = accelerate_configs()
    monkeypatch.setattr(catalog, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"zero2 needs deepspeed"):
        check_accelerate(shipped["zero2"], on_cpu=False)
    monkeypatch.setattr(catalog, "find_spec", lambda name: name)
    check_accelerate(shipped["zero2"], on_cpu=False)
    with pytest.raises(UserError, match=r"zero3.*GPUs only"):
        check_accelerate(shipped["zero3"], on_cpu=True)
    for name in ("ddp", "fsdp2"):
        check_accelerate(shipped[name], on_cpu=True)
