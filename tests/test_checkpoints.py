"""A checkpoint is whole or not there: published in one move, checked byte for byte, pruned only after the next."""

import errno
import hashlib
import json
import os
import shutil

import pytest

from pods_rl.runs import RunWriter
from pods_rl.runs import checkpoints as module
from pods_rl.runs.checkpoints import clean, last_good, prune, publish, staging, verify
from pods_rl.runs.files import write_failure
from pods_rl.runs.identity import keep_state

FILES = {"model.safetensors": b"weights" * 9, "optimizer.pt": b"momentum", "shards/rank-1.pt": b"half"}


def save(checkpoints, step, **about):
    """Publishes a checkpoint of three files, one in a folder."""
    target = checkpoints / f"checkpoint-{step}"
    for name, content in FILES.items():
        path = staging(target) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    publish(target, {"step": step, **about})
    return target


def names(checkpoints):
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_published_checkpoint_has_all_files_and_their_hashes(tmp_path):
    folder = save(tmp_path, 4, processes=2, recipe={"keys": {"seed": 1}})
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in FILES.items()
    }
    assert {key: manifest[key] for key in ("format", "step", "processes")} == {"format": 1, "step": 4, "processes": 2}
    assert verify(folder) == []
    assert names(tmp_path) == ["checkpoint-4"]
    assert (folder / "shards/rank-1.pt").read_bytes() == b"half"


def test_a_checkpoint_that_was_copied_from_another_run_is_skipped(tmp_path):
    tokens = {}
    for name in ("mine", "other"):
        with RunWriter(tmp_path / name) as writer:
            tokens[name] = writer.write_environment({})
    checkpoints = tmp_path / "mine" / "checkpoints"
    for step, name in ((2, "mine"), (4, "other"), (6, "old")):
        folder = save(checkpoints, step)
        callbacks: dict = {}
        keep_state(callbacks, {"token": tokens.get(name, ""), "step": step})
        (folder / "trainer_state.json").write_text(json.dumps({"stateful_callbacks": callbacks}))
    folder, skipped = last_good(checkpoints)
    assert folder == checkpoints / "checkpoint-2"
    assert [line.partition(":")[0] for line in skipped] == ["checkpoint-6", "checkpoint-4"]
    # of a run without a token: those of others have one, or none is known
    (tmp_path / "mine" / "environment.json").write_text('{"seed": 1}')
    assert last_good(checkpoints)[0] == checkpoints / "checkpoint-6"
    (tmp_path / "mine" / "environment.json").write_text("{")
    assert last_good(checkpoints)[0] == checkpoints / "checkpoint-6"


def cut(folder):
    (folder / "optimizer.pt").write_bytes(b"momen")


def flip(folder):
    (folder / "optimizer.pt").write_bytes(b"momentuM")


SPOILED = {
    "missing file": (lambda f: (f / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "wrong size": (cut, "optimizer.pt has 5 bytes, expected 8"),
    "wrong hash": (flip, "optimizer.pt has changed: its hash is not the manifest's"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no manifest.json: killed while it was saved"),
    "torn manifest": (lambda f: (f / "manifest.json").write_text('{"format": 1, "fil'), "manifest.json cannot be read"),
    "manifest of later": (
        lambda f: (f / "manifest.json").write_text('{"format": 2, "files": {"a": {}}}'),
        "expected format 1, got 2",
    ),
    "manifest of another kind": (
        lambda f: (f / "manifest.json").write_text('{"format": 1, "step": 10, "files": {"optimizer.pt": 3}}'),
        "optimizer.pt has 8 bytes, expected None",
    ),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_wrong_is_named_and_an_older_one_is_taken(tmp_path, kind):
    good, torn = save(tmp_path, 9), save(tmp_path, 10)
    spoil, problem = SPOILED[kind]
    spoil(torn)
    assert problem in verify(torn)[0]
    found, passed = last_good(tmp_path)
    assert found == good
    assert len(passed) == 1
    assert passed[0].startswith("checkpoint-10: ")
    assert problem in passed[0]


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_kill_between_any_two_moves_leaves_old_or_new(tmp_path, monkeypatch, moves):
    """Each `os.replace` of a replacement may be the last thing that happens."""
    old = save(tmp_path, 3, name="old")
    real, done = os.replace, []

    def replace(*where):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(where)
        real(*where)

    monkeypatch.setattr(module.os, "replace", replace)
    try:
        save(tmp_path, 3, name="new")
    except KeyboardInterrupt:
        monkeypatch.undo()
        clean(tmp_path)
    assert verify(old) == []
    assert json.loads((old / "manifest.json").read_text())["name"] == ("old" if moves < 2 else "new")
    assert names(tmp_path) == ["checkpoint-3"]


def test_everything_is_flushed_before_the_move(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def flush(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(module.os, "fsync", flush)
    monkeypatch.setattr(module.os, "replace", lambda *where: (events.append("move"), replace(*where)))
    target = save(tmp_path, 2)
    before, after = events[: events.index("move")], events[events.index("move") + 1 :]
    staged = str(staging(target))
    assert {f"{staged}/{name}" for name in (*FILES, "manifest.json", "shards")} | {staged} == set(before)
    assert after == [str(tmp_path)]


def test_pruning_keeps_the_newest_whole_ones(tmp_path):
    for step in (2, 4, 6, 10):
        save(tmp_path, step)
    cut(tmp_path / "checkpoint-6")
    prune(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-4", "checkpoint-6"]  # the torn one counts for nothing
    prune(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-10"]


NOT_OURS = ["checkpoint-best", "checkpoint-6-keep", "checkpoint-8.bak", "checkpoint-06", "checkpoint-٦"]


def entries(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_only_ours_are_pruned_replaced_and_resumed_from(tmp_path):
    """Copies of a whole checkpoint under names of the user's, files, links, folders of another trainer's."""
    whole = save(tmp_path / "elsewhere", 6)
    for name in NOT_OURS:
        shutil.copytree(whole, tmp_path / name)
    shutil.copytree(whole, tmp_path / "checkpoint-9")  # a copy of step 6
    (tmp_path / "checkpoint-notes.txt").write_text("mine")
    (tmp_path / "checkpoint-3").write_text("a file")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/weights").write_text("of another trainer")
    (tmp_path / "checkpoint-6").symlink_to(whole)
    (tmp_path / "checkpoint-8").symlink_to(tmp_path / "nowhere")
    before = entries(tmp_path)
    save(tmp_path, 1)
    save(tmp_path, 2)
    prune(tmp_path, 1)
    assert entries(tmp_path) - before == {f"checkpoint-2/{name}" for name in (*FILES, "manifest.json", "shards")} | {
        "checkpoint-2"
    }
    assert before <= entries(tmp_path)
    found, passed = last_good(tmp_path)
    assert found == tmp_path / "checkpoint-6"  # a link to a whole one will do
    assert [note.split(" is ")[0] for note in passed] == ["checkpoint-9: manifest.json"]
    assert last_good(tmp_path / "elsewhere")[0] == whole


@pytest.mark.parametrize("kind", ["dangling link", "link", "file", "folder"])
def test_what_has_the_name_of_a_new_checkpoint_is_kept_beside_it(tmp_path, kind):
    mine = tmp_path / "checkpoint-8"
    if kind == "file":
        mine.write_text("mine")
    elif kind == "folder":
        mine.mkdir()
        (mine / "notes").write_text("mine")
    else:
        mine.symlink_to(save(tmp_path / "elsewhere", 8) if kind == "link" else "nowhere")
    save(tmp_path, 8)
    assert verify(mine) == []
    assert not mine.is_symlink()
    kept = tmp_path / "checkpoint-8.kept-1"
    assert kept.is_symlink() == ("link" in kind)
    assert save(tmp_path, 8) == mine  # ours: replaced
    assert not os.path.lexists(tmp_path / "checkpoint-8.kept-2")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), "written"),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "space"),
        (Exception("I/O error: No such file or directory (os error 2)"), None),
        (RuntimeError("CUDA error: out of memory"), None),
    ],
)
def test_a_full_disk_is_told_from_other_faults(error, told):
    found = write_failure(error)
    assert found is None if told is None else told in found
