"""Checkpoints survive kills at any point of saving, and full disks: a run goes on from the last whole one, exactly."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pods_rl.runs import Run
from pods_rl.runs.checkpoints import last_good, verify

from .commands import Command, differences, outcome, server, write_recipe

SLICE = 0.0003  # seconds that a run which saves is let go on between looks
POINTS, DISKS = 20, 5
KILLED_AT = 3  # the checkpoint whose saving is killed: one before it stays, one is pruned


class Reference(NamedTuple):
    """The uninterrupted run: what it came to, and how many slices the save took that others are killed in."""

    outcome: dict[str, object]
    slices: int


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoints")
    write_recipe(place)
    return place


@pytest.fixture(scope="module")
def reference(place):
    command = held_at_saving(place, "reference")
    slices = 0
    while stage_of(place / "reference") != "pruned":
        command.slice(SLICE)
        slices += 1
    command.kill(signal.SIGCONT)
    assert command.wait() == 0, command.log.read_text()
    return Reference(outcome(place / "reference"), slices)


def start(place: Path, name: str) -> Command:
    return server().start("train", "--config", "r.yaml", "--output", name, cwd=place, log=f"{name}.log")


def resume(place: Path, name: str) -> tuple[int, str]:
    return server().run("train", "--output", name, "--resume", cwd=place, log=f"{name}.resumed.log")


def held(place: Path, name: str, reached: Callable[[], bool], missed: Callable[[], bool]) -> Command:
    """A run that is held at a moment; started again where a busy machine has missed it."""
    for _ in range(20):
        command = start(place, name)
        assert command.until(reached), command.log.read_text()
        command.kill(signal.SIGSTOP)
        if not missed():
            return command
        command.kill(signal.SIGKILL)
        command.wait()
        shutil.rmtree(place / name)
    raise AssertionError(f"no run could be held in time: {command.log.read_text()}")


def held_at_saving(place: Path, name: str) -> Command:
    """A run that has made the step after which it is killed; its checkpoint is what it does next."""
    metrics, run = place / name / "metrics.jsonl", place / name
    return held(
        place,
        name,
        lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= KILLED_AT,
        lambda: stage_of(run) in ("published", "pruned"),
    )


def stage_of(run: Path) -> str:
    """How far the saving of that checkpoint is, by what lies in the run's directory."""
    checkpoints = run / "checkpoints"
    staged = checkpoints / f".saving/checkpoint-{KILLED_AT}"
    if (checkpoints / f"checkpoint-{KILLED_AT}").exists():
        left = (checkpoints / "checkpoint-1").exists() or (checkpoints / ".saving/checkpoint-1").exists()
        return "published" if left else "pruned"
    if (staged / "manifest.json").exists():
        return "manifest written"
    if (staged / "trainer_state.json").exists():
        return "hashing"
    return "writing" if staged.exists() else "before"


def kill_while_saving(place: Path, reference: Reference, points: list[int]) -> None:
    """Kill a run at each of some points of `POINTS` over the whole saving, and go on."""
    for point in points:
        name = f"killed-{point}"
        run, ended = place / name, 0
        while ended != -signal.SIGKILL:  # or it came to its end in a slice, which a busy machine makes longer
            shutil.rmtree(run, ignore_errors=True)
            command = held_at_saving(place, name)
            for _ in range(round(point * reference.slices / (POINTS - 1))):
                if stage_of(run) == "pruned":
                    break  # quicker than the reference: the next step is not the one to be killed
                command.slice(SLICE)
            command.kill(signal.SIGKILL)
            ended = command.wait()
        stage = stage_of(run)
        published = stage in ("published", "pruned")
        good, _ = last_good(run / "checkpoints")
        assert good is not None
        # once pruned the run may be a step further: a slice is as long as a busy machine makes it
        newest = {path.name for path in Run(run).checkpoints()} if stage == "pruned" else {f"checkpoint-{KILLED_AT}"}
        assert good.name in (newest if published else {f"checkpoint-{KILLED_AT - 1}"}), stage
        code, words = resume(place, name)
        assert code == 0, words
        assert good.name in words
        assert differences(reference.outcome, outcome(run)) == [], f"point {point}, {stage}"
        assert not (run / "checkpoints/.saving").exists()


def test_a_run_that_was_killed_while_it_saved_goes_on_exactly(place, reference):
    kill_while_saving(place, reference, [POINTS // 2])


@pytest.mark.reliability
@pytest.mark.timeout(7200)
def test_kills_over_the_whole_saving(place, reference):
    kill_while_saving(place, reference, list(range(POINTS)))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 32 MiB in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def starve(place: Path, disk: Path, reference: Reference, room: int, name: str) -> None:
    """A run whose disk is full, but for ``room`` bytes, from after its second checkpoint on."""
    write_recipe(disk)
    run = disk / name
    second, third = (run / f"checkpoints/checkpoint-{step}" for step in (2, 3))
    command = held(disk, name, second.exists, third.exists)
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - room)
    command.kill(signal.SIGCONT)
    assert command.wait() == 2, command.log.read_text()
    errors = [line for line in command.log.read_text().splitlines() if line.startswith("Error:")]
    assert len(errors) == 1, command.log.read_text()
    assert "Traceback" not in command.log.read_text()
    good, passed = last_good(run / "checkpoints")
    assert good is not None
    assert not passed, passed
    assert verify(good) == []
    assert good.name in command.log.read_text()
    filler.unlink()
    assert Run.open(run).state in ("failed", "killed")  # its last status had room, or not
    code, words = resume(disk, name)
    assert code == 0, words
    assert differences(reference.outcome, outcome(run)) == []


def test_a_full_disk_costs_nothing_that_was_saved(place, small_disk, reference):
    starve(place, small_disk, reference, 6 << 20, "starved")


@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_several_full_disks(place, small_disk, reference):
    """From no room at all to all but the last files of a checkpoint of some 10 MB."""
    for number in range(DISKS):
        starve(place, small_disk, reference, number * (10 << 20) // DISKS, "starved")
        subprocess.run(["rm", "-r", small_disk / "starved"], check=True)
