"""Experiments: what is planned, what is repeated, and what a failure costs. The runs are stand-ins."""

import errno
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.experiment import DeclaredPair, build_experiment, load_experiment, run_experiment, train_in_process
from pods_rl.recipe import load_recipe
from pods_rl.recipe.contents import contents_of
from pods_rl.runs import Run, RunWriter, find_runs
from pods_rl.runs.checkpoints import publish, staging
from pods_rl.yaml_files import Origin, parse_yaml

from . import DEADLINE

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


def finish(config: Path, output: Path, *_, resume: bool = False) -> int:
    """A run that ends well."""
    with RunWriter(output, resume=resume) as writer:
        writer.write_config(config.read_text())
        writer.write_status("finished", step=3)
    return 0


def run(what, output, launch=finish, **options):
    """Run an experiment; return how its runs ended, and each event with what it says of its run."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pods_rl.experiment.train_in_process", launch)
        counts = run_experiment(what, output, events.append, **options)
    return counts, [(event.kind, event.run.arm, event.run.seed, event.reason) for event in events]


def test_seeds_go_outside_and_arms_inside():
    plan = experiment().plan()
    assert [(run.arm, run.seed) for run in plan] == [("pods", 1), ("grpo", 1), ("pods", 2), ("grpo", 2)]
    assert [run.recipe.values["num_rollouts"] for run in plan] == [32, 8, 32, 8]
    assert [run.recipe.values["seed"] for run in plan] == [1, 1, 2, 2]
    assert [str(run.path) for run in plan][:2] == ["pods/seed-1", "grpo/seed-1"]


def test_it_writes_a_file_that_gives_the_same_experiment(tmp_path):
    first = experiment(f"{TEXT}\nabout: |\n  Two arms.\n  Look at the end.\n", max_seconds="5", seeds="[3, 7]")
    (tmp_path / "experiment.yaml").write_text(first.to_yaml())
    again = load_experiment(tmp_path / "experiment.yaml")
    assert again.to_yaml() == first.to_yaml()
    assert again.seeds == (3, 7)
    assert again.base["max_seconds"] == 5
    assert again.about == "Two arms.\nLook at the end."


def test_pairs_are_declared_against_the_baseline_if_no_other_arm_is_named():
    entries = [{"arm": "pods", "shows": "selection"}]
    planned = experiment(f"{TEXT}\npairs: {json.dumps(entries)}\n")
    assert planned.pairs == (DeclaredPair("pods", "grpo", "selection"),)
    assert experiment(planned.to_yaml()).pairs == planned.pairs
    assert experiment().pairs == ()
    same = {"arm": "grpo", "against": "pods"}
    for wrong in ([3], [{"arm": "dpo"}], [{"arm": "grpo"}], [same, *entries]):
        with pytest.raises(UserError, match="pairs"):
            experiment(f"{TEXT}\npairs: {json.dumps(wrong)}\n")


def test_the_base_may_be_a_recipe(tmp_path):
    (tmp_path / "base.yaml").write_text("max_seconds: 4\nnum_generations: 8\nseed: 9\n")
    (tmp_path / "e.yaml").write_text("arms: {a: {}}\nbase: base.yaml\n")
    what = load_experiment(tmp_path / "e.yaml")
    assert what.plan()[0].recipe.values["max_seconds"] == 4
    assert what.plan()[0].recipe.values["seed"] == 1
    assert (what.name, what.baseline, what.seeds) == ("e", "a", (1,))
    shipped = build_experiment({"arms": {"a": {}}, "base": "tiny-pods"}, Origin("e"))
    assert shipped.plan()[0].recipe.values["num_rollouts"] == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: {}\n", "arms: "),
        ("arms: {../x: {}}\n", r"'\.\./x'"),
        ("arms: {a: {seed: 1}}\n", r"\bseed: "),
        ("arms: {a: {}}\nbaseline: b\n", "mine.yaml:2: baseline: .*'b'"),
        ("arms: {a: {}}\nseeds: 0\n", "seeds: .*0,"),
        ("arms: {a: {}}\nbase: 3\n", "base: .*3,"),
        ("arms: {a: {}}\nabout: 3\n", "about: .*3,"),
        ("arms: {a: {rul: random}}\n", r"\brul: .*rule\?"),
        ("arms: {a: {num_rollouts: 64, 16}}\n", "arm a: 16: "),
    ],
)
def test_a_wrong_experiment_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        experiment(text).plan()


def test_an_override_must_not_make_the_arms_alike():
    with pytest.raises(UserError, match="--num_rollouts"):
        experiment(num_rollouts="64")
    with pytest.raises(UserError, match=r"--beta: .*'x'"):
        experiment(beta="x")
    with pytest.raises(UserError, match="--seeds"):
        experiment(seed="7")


def test_every_recipe_is_checked_before_the_first_run(tmp_path):
    text = TEXT.replace("grpo:\n", "grpo: {num_rollouts: 4}\n")
    with pytest.raises(UserError, match=r"mine\.yaml, .*grpo: num_rollouts = 4"):
        run(experiment(text), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_finished_runs_are_not_repeated(tmp_path):
    counts, events = run(experiment(), tmp_path)
    assert counts == {"finished": 4}
    assert [event[:3] for event in events[:2]] == [("started", "pods", 1), ("finished", "pods", 1)]
    assert run(experiment(), tmp_path)[0] == {"skipped": 4}
    assert run(experiment(seeds="3"), tmp_path)[0] == {"skipped": 4, "finished": 2}
    found = find_runs(tmp_path)
    assert list(found) == ["pods", "grpo"]
    assert [r.seed for r in found["grpo"]] == [1, 2, 3]
    assert yaml.safe_load((tmp_path / "experiment.yaml").read_text())["baseline"] == "grpo"


def save(run: Path, step: int, processes: int = 1) -> None:
    """A complete checkpoint."""
    target = run / f"checkpoints/checkpoint-{step}"
    staging(target).mkdir(parents=True)
    (staging(target) / "model.bin").write_bytes(b"x")
    publish(target, {"step": step, "processes": processes})


def interrupted(config: Path, output: Path, *_, resume: bool = False) -> int:
    """A run that is killed after its step 2, with a checkpoint of it."""
    with RunWriter(output, resume=resume) as writer:
        writer.write_config(config.read_text())
        writer.write_status("running", step=2)
    save(output, 2)
    return -9


def notes(what, output, launch=finish, **options) -> list[str | None]:
    """Run an experiment; what it says of each run that it starts."""
    _, events = run(what, output, launch, **options)
    return [reason for kind, *_, reason in events if kind == "started"]


def test_an_unfinished_run_resumes_from_its_checkpoint_in_its_own_directory(tmp_path):
    one = experiment(seeds="1")
    assert notes(one, tmp_path, interrupted) == [None, None]
    resumed = []

    def launch(config, output, *_, resume):
        resumed.append(resume)
        return finish(config, output, resume=resume)

    assert [note.split()[-1] for note in notes(one, tmp_path, launch)] == ["checkpoint-2"] * 2
    assert resumed == [True, True]
    assert not (tmp_path / ".attempts").exists()
    assert Run.open(tmp_path / "pods/seed-1").state == "finished"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ("torn", "starts again: it has no complete checkpoint"),
        ("recipe", "starts again: its recipe has changed"),
        ("evaluation", "starts again: its recipe has changed"),  # one curve would have points of two kinds
        ("processes", "starts again: its number of processes has changed"),
    ],
)
def test_a_run_that_cannot_resume_starts_again_and_says_why(tmp_path, change, note):
    notes(experiment(seeds="1"), tmp_path, interrupted)
    for path in tmp_path.glob("*/seed-1"):
        if change == "torn":
            (path / "checkpoints/checkpoint-2/model.bin").write_bytes(b"y")
        elif change == "processes":
            save(path, 3, processes=2)
    changed = {"recipe": {"learning_rate": "0.5"}, "evaluation": {"eval_prompts": "7"}}
    assert notes(experiment(seeds="1", **changed.get(change, {})), tmp_path) == [note, note]
    kept = {path.name for path in (tmp_path / ".attempts").iterdir()}
    assert kept == {"pods-seed-1-1", "grpo-seed-1-1"}


def test_a_resume_that_ends_before_it_trains_is_a_failure_of_its_own(tmp_path):
    """It leaves the earlier status, `stopped`, which says nothing about it."""

    def stopped(*job, **options):
        interrupted(*job, **options)
        with RunWriter(job[1], resume=True) as writer:
            writer.write_status("stopped", reason="interrupted by SIGINT")
        return 130

    def cannot_load(config, output, *_, **__):
        (output / "log.txt").write_text("Error: no such model\n")
        return 2

    assert run(experiment(seeds="1"), tmp_path, stopped)[0] == {"stopped": 2}
    _, events = run(experiment(seeds="1"), tmp_path, cannot_load)
    failures = [reason for kind, *_, reason in events if kind == "failed"]
    assert [failure.endswith(": no such model") for failure in failures] == [True] * 2


PROGRESS = "seed-1: step 3 of 10, 1.73 s a step, reward 0.250\n"
TRACE = """Traceback (most recent call last):
  File "mine.py", line 3, in reward
    return state["a"]
KeyError: 'a'
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (PROGRESS, "exit code 3"),
        (f"{PROGRESS}Error: no such model\n", "exit code 3: Error: no such model"),
        (f"Error: printed by a reward\n{PROGRESS * 12}", "exit code 3"),
        (f"{PROGRESS}{TRACE}", "exit code 3: KeyError: 'a'"),
        (f"{PROGRESS}Fatal Python error: Aborted\n\nThread 1:\n", "exit code 3: Fatal Python error: Aborted"),
    ],
)
def test_only_an_error_in_the_log_of_a_run_is_its_reason(tmp_path, log, reason):
    def fails(_, output, *__, **___):
        output.mkdir(parents=True)
        (output / "log.txt").write_text(log)
        return 3

    run(experiment(seeds="1"), tmp_path, fails)
    assert Run.open(tmp_path / "pods/seed-1").status["reason"] == reason


def test_a_finished_run_of_another_recipe_is_refused_by_name(tmp_path):
    run(experiment(), tmp_path)
    changed = experiment(learning_rate="0.5")
    with pytest.raises(UserError, match=r"learning_rate \(was 1e-06, now 0\.5\).*--force"):
        run(changed, tmp_path)
    assert run(changed, tmp_path, force=True)[0] == {"finished": 4}
    assert Run.open(tmp_path / "pods/seed-1").config["learning_rate"] == 0.5
    assert Run.open(tmp_path / ".attempts/pods-seed-1-1").config["learning_rate"] == 1e-6


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def recording(launch):
    """A run that also records what its recipe names."""

    def make(config, output, *rest, **options):
        code = launch(config, output, *rest, **options)
        with RunWriter(output, resume=True) as writer:
            writer.write_environment({"contents": contents_of(load_recipe(config))})
        return code

    return make


@pytest.mark.parametrize("launch", [finish, interrupted])
def test_a_run_whose_data_have_changed_is_neither_skipped_nor_resumed(tmp_path, launch):
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n')
    base = f"model_name_or_path: tiny, max_seconds: 1, dataset_name: {data}"
    one = experiment(TEXT.replace("max_seconds: 1", base), seeds="1")
    output = tmp_path / "out"
    notes(one, output, recording(launch))
    known = files_below(output)
    data.write_text('{"question": "1+1?", "answer": "3"}\n')
    with pytest.raises(UserError, match=r"pods/seed-1 .*dataset_name \(train\.jsonl\).*--output.*--force"):
        notes(one, output)
    assert files_below(output) == known
    changed = "starts again: what its recipe names has changed: dataset_name (train.jsonl)"
    assert notes(one, output, recording(finish), force=True) == [changed] * 2
    assert run(one, output)[0] == {"skipped": 2}


def test_a_run_that_another_process_makes_is_neither_made_twice_nor_lost(tmp_path):
    """As after a kill of an earlier call, whose run continues."""
    with RunWriter(tmp_path / "grpo" / "seed-1") as other:
        other.write_config(experiment().plan()[1].recipe.to_yaml())
        other.write_status("running")
        counts, events = run(experiment(), tmp_path)
        assert counts == {"finished": 3, "failed": 1}
        assert ("started", "grpo", 1) not in [event[:3] for event in events]
        other.write_status("finished")
    assert run(experiment(), tmp_path)[0] == {"skipped": 4}


def test_a_second_call_on_the_same_place_is_refused(tmp_path):
    def again(*job, **_):
        with pytest.raises(UserError, match="`pods"):
            run(experiment(), tmp_path)
        return finish(*job)

    assert run(experiment(seeds="1"), tmp_path, again)[0] == {"finished": 2}
    assert run(experiment(seeds="1"), tmp_path)[0] == {"skipped": 2}


def test_a_full_disk_costs_the_runs_it_hits_and_is_reported(tmp_path, monkeypatch):
    """Neither the run nor we can write its status; replaces the disk by a writer that fails for one arm."""

    class Full(RunWriter):
        def write_status(self, state, **values):
            if "pods" in str(self.path):
                raise OSError(errno.ENOSPC, "No space left on device", str(self.path / "status.json"))
            super().write_status(state, **values)

    def launch(config, output, *_, **__):
        return 1 if "pods" in str(output) else finish(config, output)

    monkeypatch.setattr("pods_rl.runs.run.RunWriter", Full)
    counts, events = run(experiment(seeds="1"), tmp_path, launch)
    assert counts == {"failed": 1, "finished": 1}
    (reason,) = [reason for kind, *_, reason in events if kind == "failed"]
    assert "status.json: " in reason


@pytest.mark.parametrize(
    ("chosen", "parallel", "places"),
    [(None, 2, {None}), ("4,7", 1, {"4"}), ("4,7", 3, {"4", "7"})],
)
def test_each_place_has_a_gpu_of_its_own(tmp_path, monkeypatch, chosen, parallel, places):
    """`nvidia-smi` is taken away: what is visible is what CUDA_VISIBLE_DEVICES says."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    together = threading.Barrier(min(parallel, 2))
    given = []

    def launch(config, output, accelerate, environment, **_):
        if parallel > 1:
            together.wait(timeout=DEADLINE)
        given.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return finish(config, output)

    run(experiment(seeds="3"), tmp_path, launch, parallel=parallel)
    assert set(given) == places


def test_several_processes_a_run_are_launched_by_accelerate(tmp_path, monkeypatch):
    """Replaces Python by a program that prints its words."""
    monkeypatch.setattr("pods_rl.recipe.catalog.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"zero2 .*deepspeed"):
        run(experiment(TEXT + "accelerate: zero2\n"), tmp_path / "out")
    monkeypatch.setattr("pods_rl.recipe.catalog.find_spec", lambda name: name)
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    what = experiment(TEXT + "accelerate: zero2\n")
    assert what.processes == 8
    assert experiment(what.to_yaml()).accelerate == "zero2"
    run(what, tmp_path / "out", train_in_process)
    words = (tmp_path / "out" / "pods" / "seed-1" / "log.txt").read_text().split()
    assert words[:3] == ["-m", "pods_rl", "train"]
    assert Path(words[words.index("--accelerate_config") + 1]).name == "zero2.yaml"
    with pytest.raises(UserError, match=r"8 processes .*--parallel"):
        run(what, tmp_path / "other", parallel=2)
    with pytest.raises(UserError, match=r"zero22 .*zero2\?"):
        experiment(TEXT + "accelerate: zero22\n")


@pytest.mark.parametrize(("sent", "parallel"), [("SIGTERM", 1), ("SIGINT", 2)])
def test_a_signal_reaches_the_runs_and_waits_until_they_have_saved_themselves(tmp_path, sent, parallel):
    """Replaces `pods train` by a program that signals its parent in the arm pods, once all have started."""
    stand_in = tmp_path / "stand-in" / "pods_rl" / "__main__.py"
    stand_in.parent.mkdir(parents=True)
    (stand_in.parent / "__init__.py").write_text("")
    stand_in.write_text(
        textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        output = pathlib.Path(sys.argv[-1])
        def save(number, frame):
            (output / "saved").write_text("saved")
            sys.exit(130)
        signal.signal(signal.SIGTERM, save)
        (output / "status.json").write_text('{{"state": "running", "step": 5}}')
        while output.parent.name == "pods" and len([*output.parents[1].glob("*/*/status.json")]) < {parallel}:
            time.sleep(0.01)
        if output.parent.name == "pods":
            os.kill(os.getppid(), signal.{sent})
        time.sleep(3600)
        """)
    )
    code = textwrap.dedent(f"""
        import os, pathlib, signal, sys
        from pods_rl.experiment import load_experiment, run_experiment
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
        os.environ["PYTHONPATH"] = {str(tmp_path / "stand-in")!r}
        try:
            run_experiment(load_experiment("mine.yaml"), "out", parallel={parallel})
        except KeyboardInterrupt as error:
            print(error)
    """)
    (tmp_path / "mine.yaml").write_text(TEXT)
    words = {"capture_output": True, "text": True, "timeout": DEADLINE, "stdin": subprocess.DEVNULL, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", code], **words)
    assert done.stdout.endswith(f" {sent}\n"), done.stderr
    started = [tmp_path / "out" / arm / "seed-1" for arm in ("pods", "grpo")[:parallel]]
    assert sorted(run.path for runs in find_runs(tmp_path / "out").values() for run in runs) == sorted(started)
    for path in started:
        status = Run.open(path).status
        assert (status["state"], status["reason"], status["step"]) == ("stopped", "interrupted", 5)
        assert (path / "saved").is_file()


def test_an_experiment_is_stored_over_no_file_of_another(tmp_path):
    given = tmp_path / "experiment.yaml"
    given.write_text("# mine\nbase: tiny-pods\narms: {a: {}}\n")
    what = load_experiment(given)
    with pytest.raises(UserError, match=r"experiment\.yaml"):
        run_experiment(what, tmp_path, lambda event: None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "experiment.yaml").write_text("# notes\n")
    with pytest.raises(UserError, match=r"experiment\.yaml"):
        run_experiment(what, tmp_path / "out", lambda event: None)
    assert given.read_text().startswith("# mine")
