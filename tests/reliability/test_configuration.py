"""A recipe that cannot work is refused before torch is imported; the message names the key, the value or the file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pods_rl.cli.commands import app
from pods_rl.errors import UserError

GOOD = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False}
# what is wrong: the recipe (keys, or a text), more words of the command, and what the message names
BAD: dict[str, tuple[object, list[str], list[str]]] = {
    "a python tag": ("seed: !!python/object/apply:os.getpid []\n", [], ["r.yaml:1", "python/object"]),
    "no limit": ("seed: 1\n", [], ["max_seconds"]),
    "a path that is too long": ({}, ["--config", "a" * 5000], ["too long"]),
    "a directory that is a file": ({}, ["--output", "rows.jsonl/mine"], ["rows.jsonl/mine"]),
    "nothing to resume": ({}, ["--resume", "--output", "nowhere"], ["nowhere"]),
}


@pytest.mark.parametrize("what", BAD)
def test_refused_before_torch_is_imported(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content, words, names = BAD[what]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pods_rl.training.run", None)  # importing it, and so torch, is an error
    Path("r.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump({**GOOD, **content}))  # type: ignore[dict-item]
    Path("rows.jsonl").write_text("{}")
    config = [] if "--config" in words else ["--config", "r.yaml"]
    result = CliRunner().invoke(app, ["train", *config, *words])
    assert isinstance(result.exception, UserError), repr(result.exception)
    message = str(result.exception)
    assert [name for name in names if name not in message] == [], message
    assert len(message) < 700
