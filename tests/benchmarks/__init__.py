"""The small forms of what is in benchmarks/: they run, and what is not a time in them is right."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str) -> ModuleType:
    """A benchmark as a module; those beside it can be imported from it, as when it is run."""
    specification = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = loaded  # dataclasses look their module up
    sys.path.insert(0, str(BENCHMARKS))
    try:
        specification.loader.exec_module(loaded)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return loaded


def stand_in_for_chat(folder: Path) -> dict[str, str]:
    """The keys of the chat model's policy and data, which benchmarks/chat.py makes: here a file with one question."""
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1?", "answer": "1"}\n')
    return {"model_name_or_path": str(folder), "dataset_name": str(data), "dataset_test_name": str(data)}
