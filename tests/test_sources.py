"""The user's modules that a run has imported: found however they are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pods_rl.recipe import Origin, build_recipe
from pods_rl.recipe.contents import contents_of, module_hashes
from pods_rl.runs.identity import changed_contents
from pods_rl.runs.sources import code_hash, file_hashes, installed_hash

FILES = {
    "judge.py": "import json, numpy\nimport helper\ndef judge(text, gold): ...\n",
    "helper.py": "from own.rules import best\n",
    "own/__init__.py": "from . import names\n",
    "own/names.py": "",
    "own/rules.py": "def best(rewards, m, *, generator=None): from .late import nothing\nfrom .deep import scale\n",
    "own/late.py": "nothing = 1",
    "own/deep/__init__.py": "from pods_rl.errors import UserError\nscale = 1",
    "own/unused.py": "",
    "inserted.py": "import sys\nsys.path.insert(0, 'lib')\nimport hidden\ndef judge(text, gold): ...\n",
    "lib/hidden.py": "import deeper\n",
    "lib/deeper.py": "",
    "space/inner.py": "def judge(text, gold): ...\n",
    "env/lib/site-packages/bought/__init__.py": "from .rules import best\n",
    "env/lib/site-packages/bought/rules.py": "from .help import scale\ndef best(rewards, m, *, generator=None): ...\n",
    "env/lib/site-packages/bought/help.py": "scale = 1\n",
}
OWN = ["own/__init__.py", "own/deep/__init__.py", "own/names.py", "own/rules.py"]  # `late` was not imported
IMPORTED = {
    "judge": ["helper.py", "judge.py", *OWN],
    "inserted": ["deeper.py", "hidden.py", "inserted.py"],
    "space.inner": ["space/inner.py"],
    "json.decoder": [],
    "bought.rules": [],
}
CODE = """
import importlib, json, sys
from pods_rl.runs.sources import user_sources
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(json.dumps(user_sources()))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "env/lib/site-packages"))
    return tmp_path


def sources(*names: str) -> list[dict[str, str]]:
    """What a fresh process finds after each of these imports, with this process's path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CODE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_modules_that_a_process_has_imported_are_found(place):
    known = set()
    for name, found in zip(IMPORTED, sources(*IMPORTED), strict=True):
        assert found.keys() - known == set(IMPORTED[name]), name
        assert all(Path(file).is_file() for file in found.values())
        known = found.keys()


def build(**values):
    return build_recipe({"max_seconds": 1, "model_name_or_path": "tiny", **values}, Origin("r.yaml"))


@pytest.mark.parametrize("name", ["bought/help.py", "bought/rules.py"])
def test_the_code_of_an_installed_package_is_in_the_contents(place, name):
    recipe = build(rule="bought.rules:best", num_rollouts=16)
    before = contents_of(recipe)
    assert set(before["rule"]) == {"bought"}
    (place / "env/lib/site-packages" / name).write_text("scale = 2\n")
    assert changed_contents(before, contents_of(recipe)) == ["rule (bought)"]
    assert installed_hash("json") is installed_hash("judge") is installed_hash("numpy") is None


def test_recorded_files_are_read_again(place):
    (recorded,) = sources("inserted")
    saved = module_hashes(recorded)
    assert changed_contents(saved, module_hashes(recorded)) == []
    (place / "lib/deeper.py").write_text("x = 1\n")
    (place / "lib/hidden.py").unlink()  # it is not compared, since no process can import it
    assert changed_contents(saved, module_hashes(recorded)) == ["modules (deeper.py)"]
    for damaged in (None, [], "x"):
        assert changed_contents(saved, module_hashes(damaged)) == []
    assert module_hashes({"a.py": 3, "b.py": None, "c.py": "\0"}) == {"modules": {}}


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert file_hashes({"a": tmp_path / "pipe.py", "b": tmp_path / "gone"}) == {}


def test_functions_differ_by_their_source():
    def first(text, gold):
        return 1.0

    first_reward = first

    def first(text, gold):
        return 2.0

    class Judge:
        def __call__(self, text, gold): ...

    assert first.__name__ == first_reward.__name__
    assert code_hash(first) != code_hash(first_reward)
    assert code_hash(Judge()) == code_hash(Judge)
    assert code_hash(len) is None
