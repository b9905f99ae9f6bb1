"""What decides a run and is not in its recipe: files, folders and modules that it names, by their contents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pods_rl.recipe import Origin, build_recipe
from pods_rl.recipe.contents import contents_of, module_hashes
from pods_rl.recipe.recipe import DATA_FOLDERS
from pods_rl.recipe.schema import TASKS
from pods_rl.runs.identity import changed_contents
from pods_rl.runs.sources import code_hash, file_hashes

FILES = {
    "train.jsonl": '{"question": "1+1?", "answer": "2"}\n',
    "folder/train.jsonl": "{}\n",
    "test/test_own.py": "",
    "folder/more/train.csv": "question,answer\n",
    "folder/.cache/x.json": "{}",
    "folder/runs/one/status.json": "{}",
    "folder/runs/one/evals.jsonl": "{}",
    "data/gsm8k/train.jsonl": "{}\n",
    "data/gsm8k/notes.md": "notes",
    "data/math/train.jsonl": "{}\n",
    "exits.py": "def judge(text, gold): ...\nraise SystemExit\n",
    "other.py": "",
    "policy/model.safetensors": "0123456789",
    "policy/config.json": "{}",
    "policy/chat_template.jinja": "{{ messages }}",
    "policy/manifest.json": "{}",
    "policy/README.md": "",
    "adapter/adapter_config.json": '{"base_model_name_or_path": "policy"}',
    "adapter/adapter_model.safetensors": "01",
    "zero.json": "{}",
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with `FILES`, from which modules can be imported."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "env/lib/site-packages"))
    return tmp_path


def build(**values):
    return build_recipe({"max_seconds": 1, "model_name_or_path": "tiny", **values}, Origin("r.yaml"))


NAMED = {  # what a recipe sets; the key whose contents it has, and their files
    "a file": ({"dataset_name": "train.jsonl"}, "dataset_name", ["train.jsonl"]),
    "a folder": ({"dataset_name": "folder"}, "dataset_name", ["more/train.csv", "train.jsonl"]),
    "data to test on": (
        {"dataset_name": "owner/set", "dataset_test_name": "train.jsonl"}, "dataset_test_name", ["train.jsonl"],
    ),
    "the folder of a published task": ({"task": "gsm8k", "data_dir": "data"}, "data_dir", ["gsm8k/train.jsonl"]),
    "any data of an own task": (
        {"task": "other:make", "data_dir": "data"}, "data_dir",
        ["gsm8k/notes.md", "gsm8k/train.jsonl", "math/train.jsonl"],
    ),
    "a policy": (
        {"model_name_or_path": "./policy"}, "model_name_or_path",
        ["chat_template.jinja", "config.json", "model.safetensors"],
    ),
    "an adapter": (
        {"model_name_or_path": "./adapter"}, "model_name_or_path",
        ["adapter_config.json", "adapter_model.safetensors", "base/chat_template.jinja", "base/config.json",
         "base/model.safetensors"],
    ),
    "another file": ({"deepspeed": "./zero.json"}, "deepspeed", ["zero.json"]),
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED)
def test_contents_of_all_that_a_key_names(place, what):
    values, key, files = NAMED[what]
    contents = contents_of(build(**values))
    assert sorted(contents[key]) == files
    assert all(len(digest) == 64 for digest in contents[key].values())


@pytest.mark.parametrize(
    "values", [{}, {"task": "reasoning_gym:gcd"}, {"dataset_name": "owner/set", "dataset_test_name": "test"}]
)
def test_a_recipe_that_names_no_files_has_no_contents(place, values):
    assert contents_of(build(**values)) == {}


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("dataset_name", "train.jsonl", "train.jsonl"),
        ("model_name_or_path", "./policy", "policy/model.safetensors"),
    ],
)
def test_a_file_of_the_same_size_and_time_has_changed(place, key, value, name):
    file = place / name
    before = contents_of(build(**{key: value}))
    about = file.stat()
    file.write_text(file.read_text()[::-1])
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    (changed,) = changed_contents(before, contents_of(build(**{key: value})))
    assert changed == f"{key} ({file.name})"


def test_files_that_are_new_or_gone_are_changes(place):
    values = {"dataset_name": "folder"}
    before = contents_of(build(**values))
    (place / "folder" / "test.jsonl").write_text("{}")
    (place / "folder" / "more" / "train.csv").unlink()
    assert changed_contents(before, contents_of(build(**values))) == ["dataset_name (more/train.csv, test.jsonl)"]


def test_only_what_both_sides_know_is_compared(place):
    now = contents_of(build(dataset_name="train.jsonl"))
    assert changed_contents({"data_dir": {"a": "1"}}, now) == []
    for damaged in (None, [], {"dataset_name": "x"}):
        assert changed_contents(damaged, now) == []
    saved = contents_of(build(model_name_or_path="./policy"))
    (place / "policy" / "model.safetensors").write_text("other")
    quick = contents_of(build(model_name_or_path="./policy"), weights=False)
    assert quick["model_name_or_path"]["model.safetensors"] is None
    assert changed_contents(saved, quick) == []


def test_nothing_is_imported_and_links_that_turn_in_a_circle_end(place):
    """`exits.py` would end the process that imports it."""
    (place / "folder" / "circle").symlink_to(place / "folder")
    code = """
import json, sys
from pods_rl.recipe import Origin, build_recipe
from pods_rl.recipe.contents import contents_of, module_hashes
values = {"max_seconds": 1, "model_name_or_path": "tiny", "dataset_name": "folder", "task_rewards": {"exits:judge": 1}}
contents = contents_of(build_recipe(values, Origin("r.yaml")))
heavy = {"torch", "datasets", "transformers", "exits"} & set(sys.modules)
print(json.dumps([sorted(heavy), sorted(contents["dataset_name"])]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(place)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == [[], ["more/train.csv", "train.jsonl"]]


def test_the_folders_of_published_tasks_are_those_that_the_tasks_read():
    from pods_rl.tasks.chemistry import CHEMISTRY
    from pods_rl.tasks.questions import PUBLISHED

    folders = {name: {*train.folders, *test.folders} for name, (train, test) in PUBLISHED.items()}
    folders[CHEMISTRY] = {CHEMISTRY}
    assert {name: set(of_task) for name, of_task in DATA_FOLDERS.items()} == folders
    assert set(DATA_FOLDERS) <= set(TASKS)


# -- the modules that a run has imported, however it imports them -----------------------------------------------------

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


def sources(*names: str) -> list[dict[str, str]]:
    """The modules that a new process finds after each of these imports; it has the path of this process."""
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


def test_recorded_files_are_read_again(place):
    (recorded,) = sources("inserted")
    saved = module_hashes(recorded)
    assert changed_contents(saved, module_hashes(recorded)) == []
    (place / "lib/deeper.py").write_text("x = 1\n")
    (place / "lib/hidden.py").unlink()  # it is not compared, since no process can import it
    assert changed_contents(saved, module_hashes(recorded)) == ["modules (deeper.py)"]
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
