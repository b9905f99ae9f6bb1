"""What the tests of tasks share: a cache of their own, and the hub replaced by rows."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def hub(monkeypatch):
    """`load_dataset` replaced by name: `hub.rows[(id, config, split)]` is what is there, `hub.asked` what was asked."""
    hub = SimpleNamespace(rows={}, asked=[])
    local = datasets.load_dataset

    def load(name, config=None, *, split, **files):
        if name == "json":
            return local(name, split=split, **files)
        hub.asked.append((name, config, split))
        return datasets.Dataset.from_list(hub.rows[(name, config, split)])

    monkeypatch.setattr("pods_rl.tasks.sources.load_dataset", load)
    return hub


def write_jsonl(path: Path, rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
