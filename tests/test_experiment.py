"""Experiments: what is planned, what is repeated, and what a failure costs. The runs are stand-ins."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.experiment import build_experiment, load_experiment, run_experiment
from pods_rl.recipe.reading import Source, parse_yaml
from pods_rl.runs import Run, RunWriter, find_runs

TEXT = """
name: mine
arms:
  pods: {num_rollouts: 32}
  grpo:
seeds: 2
baseline: grpo
base: {max_seconds: 1, num_generations: 8}
"""


def experiment(text=TEXT, **overrides):
    return build_experiment(*parse_yaml(text, "mine.yaml"), overrides)


def finish(config: Path, output: Path) -> int:
    """A run that ends well."""
    with RunWriter(output) as writer:
        writer.write_config(config.read_text())
        writer.write_status("finished", step=3)
    return 0


def run(what, output, launch=finish, **options):
    events = []
    counts = run_experiment(what, output, events.append, launch=launch, **options)
    return counts, [(event.kind, event.run.arm, event.run.seed) for event in events]


def test_seeds_go_outside_and_arms_inside():
    plan = experiment().plan()
    assert [(run.arm, run.seed) for run in plan] == [("pods", 1), ("grpo", 1), ("pods", 2), ("grpo", 2)]
    assert [run.recipe.values["num_rollouts"] for run in plan] == [32, 8, 32, 8]
    assert [run.recipe.values["seed"] for run in plan] == [1, 1, 2, 2]
    assert [str(run.path) for run in plan][:2] == ["pods/seed-1", "grpo/seed-1"]


def test_it_writes_a_file_that_gives_the_same_experiment(tmp_path):
    first = experiment(max_seconds="5", seeds="[3, 7]")
    (tmp_path / "experiment.yaml").write_text(first.to_yaml())
    again = load_experiment(tmp_path / "experiment.yaml")
    assert again.to_yaml() == first.to_yaml()
    assert again.seeds == (3, 7)
    assert again.base["max_seconds"] == 5


def test_keys_beside_arms_are_for_all_arms():
    what = experiment(TEXT + "max_seconds: 9\n")
    assert {run.recipe.values["max_seconds"] for run in what.plan()} == {9}


def test_the_base_may_be_a_recipe(tmp_path):
    (tmp_path / "base.yaml").write_text("max_seconds: 4\nnum_generations: 8\n")
    (tmp_path / "e.yaml").write_text("arms: {a: {}}\nbase: base.yaml\n")
    what = load_experiment(tmp_path / "e.yaml")
    assert what.plan()[0].recipe.values["max_seconds"] == 4
    assert (what.name, what.baseline, what.seeds) == ("e", "a", (1,))
    shipped = build_experiment({"arms": {"a": {}}, "base": "tiny-pods"}, Source("e"))
    assert shipped.plan()[0].recipe.values["num_rollouts"] == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: {}\n", "arms: expected names with the keys each sets"),
        ("seeds: 2\n", "arms: expected names"),
        ("arms: {../x: {}}\n", r"'\.\./x' cannot name a directory"),
        ("arms: {report: {}}\n", "'report' cannot name a directory"),
        ("arms: {1: {}}\n", "1 cannot name a directory"),
        ("arms: {a: 3}\n", "a: got 3, expected keys"),
        ("arms: {a: {seed: 1}}\n", "a: seed: arms share their seeds"),
        ("arms: {a: {}}\nbaseline: b\n", "mine.yaml:2: baseline: b is no arm: expected a"),
        ("arms: {a: {}}\nseeds: 0\n", "seeds: got 0, expected how many"),
        ("arms: {a: {}}\nseeds: true\n", "seeds: got True, expected how many"),
        ("arms: {a: {}}\nseeds: [1, 1]\n", r"seeds: got \[1, 1\], expected .* different"),
        ("arms: {a: {}}\nseeds: []\n", r"seeds: got \[\], expected"),
        ("arms: {a: {}}\nseeds: [1, x]\n", "expected how many"),
        ("arms: {a: {}}\nseed: 1\n", "seed: an experiment has seeds"),
        ("arms: {a: {}}\nbase: 3\n", "base: got 3, expected a recipe's name"),
        ("arms: {a: {}}\nbase: gone\n", "gone is neither a file nor a shipped recipe"),
    ],
)
def test_what_is_no_experiment_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        experiment(text)


def test_an_override_must_not_make_the_arms_alike():
    with pytest.raises(UserError, match="--num_rollouts would make the arms alike"):
        experiment(num_rollouts="64")
    with pytest.raises(UserError, match="--beta: got the text 'x', expected a number"):
        experiment(beta="x")


def test_every_recipe_is_checked_before_the_first_run(tmp_path):
    text = TEXT.replace("grpo:\n", "grpo: {num_rollouts: 4}\n")
    with pytest.raises(UserError, match=r"mine\.yaml, arm grpo: num_rollouts = 4 is less than"):
        run(experiment(text), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_finished_runs_are_not_repeated(tmp_path):
    counts, events = run(experiment(), tmp_path)
    assert counts == {"finished": 4}
    assert events[:2] == [("started", "pods", 1), ("finished", "pods", 1)]
    assert run(experiment(), tmp_path)[0] == {"skipped": 4}
    assert run(experiment(seeds="3"), tmp_path)[0] == {"skipped": 4, "finished": 2}
    found = find_runs(tmp_path)
    assert list(found) == ["pods", "grpo"]
    assert [r.seed for r in found["grpo"]] == [1, 2, 3]
    assert yaml.safe_load((tmp_path / "experiment.yaml").read_text())["baseline"] == "grpo"


def test_a_failed_run_costs_one_run_and_is_made_again(tmp_path):
    def fail_once(config, output):
        if "pods/seed-1" in str(output) and not (tmp_path / ".attempts").exists():
            with RunWriter(output) as writer:
                writer.write_config(config.read_text())
                writer.write_status("running", step=2, seconds=1.5)
            return -9
        return finish(config, output)

    counts, events = run(experiment(), tmp_path, fail_once)
    assert counts == {"failed": 1, "finished": 3}
    failed = Run.open(tmp_path / "pods/seed-1").status
    assert failed["state"] == "failed"
    assert failed["reason"] == "killed by the system, perhaps out of memory"
    assert (failed["step"], failed["seconds"]) == (2, 1.5)
    counts, events = run(experiment(), tmp_path, lambda c, o: finish(c, o))
    assert counts == {"finished": 1, "skipped": 3}
    assert events[:2] == [("started", "pods", 1), ("finished", "pods", 1)]
    assert Run.open(tmp_path / ".attempts/pods-seed-1-1").state == "failed"
    found = find_runs(tmp_path)
    assert {arm: [r.seed for r in runs] for arm, runs in found.items()} == {"pods": [1, 2], "grpo": [1, 2]}


def test_a_run_that_never_began_is_recorded(tmp_path):
    counts, _ = run(experiment(seeds="1"), tmp_path, lambda config, output: 2)
    assert counts == {"failed": 2}
    assert Run.open(tmp_path / "pods/seed-1").status["reason"] == "exit code 2"


def test_a_run_that_says_why_it_failed_is_believed(tmp_path):
    def fail(config, output):
        with RunWriter(output) as writer:
            writer.write_status("failed", reason="NaN loss")
        return 1

    events = []
    run_experiment(experiment(seeds="1"), tmp_path, events.append, launch=fail)
    assert [(event.kind, event.reason) for event in events][1] == ("failed", "NaN loss")


def test_a_finished_run_of_another_recipe_is_refused_by_name(tmp_path):
    run(experiment(), tmp_path)
    changed = experiment(learning_rate="0.5")
    with pytest.raises(UserError, match=r"learning_rate \(was 1e-06, now 0\.5\).*--force"):
        run(changed, tmp_path)
    assert run(changed, tmp_path, force=True)[0] == {"finished": 4}
    assert Run.open(tmp_path / "pods/seed-1").config["learning_rate"] == 0.5
    assert Run.open(tmp_path / ".attempts/pods-seed-1-1").config["learning_rate"] == 1e-6


def test_a_run_that_another_process_makes_is_left_alone(tmp_path):
    path = tmp_path / "pods" / "seed-1"
    with RunWriter(path) as writer:
        writer.write_status("running")
        with pytest.raises(UserError, match="is in use"):
            run(experiment(), tmp_path)
        assert Run.open(path).state == "running"


def test_ctrl_c_leaves_what_is_done(tmp_path):
    def interrupted(config, output):
        if "grpo" in str(output):
            with RunWriter(output) as writer:
                writer.write_status("running", step=5)
            raise KeyboardInterrupt
        return finish(config, output)

    with pytest.raises(KeyboardInterrupt):
        run(experiment(), tmp_path, interrupted)
    status = Run.open(tmp_path / "grpo/seed-1").status
    assert (status["state"], status["reason"], status["step"]) == ("stopped", "interrupted", 5)
    assert run(experiment(), tmp_path)[0] == {"skipped": 1, "finished": 3}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write to .*--output"):
        run(experiment(), tmp_path / "file")


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_termination_reaches_the_run_and_waits_for_it(tmp_path, sent):
    """`pods compare` gets a signal; its run, a process of its own, is told to end and saves itself first."""
    stand_in = tmp_path / "pods_rl" / "__main__.py"
    stand_in.parent.mkdir()
    (stand_in.parent / "__init__.py").write_text("")
    stand_in.write_text(
        textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        def save(number, frame):
            pathlib.Path({str(tmp_path / "saved")!r}).write_text("saved")
            sys.exit(130)
        signal.signal(signal.SIGTERM, save)
        os.kill(os.getppid(), getattr(signal, os.environ["SENT"]))
        time.sleep(60)
        """)
    )
    code = textwrap.dedent(f"""
        import os, pathlib, signal
        from pods_rl.experiment.running import train_in_process
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
        os.environ |= {{"PYTHONPATH": {str(tmp_path)!r}, "SENT": {sent!r}}}
        try:
            train_in_process(pathlib.Path("c"), pathlib.Path("o"))
        except KeyboardInterrupt:
            print("interrupted", pathlib.Path({str(tmp_path / "saved")!r}).read_text())
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.stdout == "interrupted saved\n"


def test_runs_side_by_side_are_in_progress_together(tmp_path):
    together = threading.Barrier(2)

    def meet(config, output):
        together.wait(timeout=30)  # breaks unless two runs are in progress at once
        return finish(config, output)

    counts, events = run(experiment(), tmp_path, meet, parallel=2)
    assert counts == {"finished": 4}
    assert sorted(events) == sorted(
        (kind, arm, seed) for kind in ("started", "finished") for arm in ("pods", "grpo") for seed in (1, 2)
    )


def test_an_interrupt_of_runs_side_by_side_starts_no_more(tmp_path):
    def interrupted(config, output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment(seeds="9"), tmp_path, interrupted, parallel=2)
    made = [found for runs in find_runs(tmp_path).values() for found in runs]
    assert len(made) < 18
    assert {found.state for found in made} <= {"stopped"}


def test_fewer_than_one_run_at_a_time_is_refused(tmp_path):
    with pytest.raises(UserError, match="parallel is 0"):
        run(experiment(), tmp_path, parallel=0)
