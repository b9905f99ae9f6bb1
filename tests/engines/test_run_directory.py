"""A script with PODSTrainer writes a run directory that `pods report` reads."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import SchedulerType, Trainer

from pods_rl import PODSConfig, PrefixTreeTrainer, RunDirectory
from pods_rl.engines.trl.guarded.run_directory import settings_of
from pods_rl.engines.trl.guarded.script_contents import script_contents
from pods_rl.errors import UserError
from pods_rl.report import build_report
from pods_rl.report.comparable import settings_that_differ, why_incomparable
from pods_rl.runs import Run, RunWriter, read_jsonl
from pods_rl.runs.identity import token_of
from pods_rl.runs.processes import this_process

from .conftest import letter_reward


def test_a_script_writes_what_a_report_shows(make_trainer, dataset, tmp_path):
    evaluations = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = make_trainer(
        num_rollouts=8, max_steps=4, trainer_arguments={"eval_dataset": dataset.select(range(4))}, **evaluations
    )
    trainer.add_callback(RunDirectory(trainer, tmp_path / "run", rollouts_every=3))
    trainer.train()
    run = Run.open(tmp_path / "run")
    assert (run.state, run.step, run.seed) == ("finished", 4, 3)
    assert 0 < run.seconds < run.elapsed
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert run.metrics[0]["reward"] == trainer.state.log_history[0]["reward"]
    assert [row["step"] for row in run.evals] == [2, 4]
    evaluated = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert [row["reward"] for row in run.evals] == evaluated
    assert set(run.evals[0]) >= {"due", "seconds", f"reward/{letter_reward.__name__}", "mean_completion_tokens"}
    assert {"num_rollouts": 8, "num_generations": 4, "rule": "max_variance", "seed": 3}.items() <= run.config.items()
    assert "output_dir" not in run.config
    assert run.environment["precision"] == "float32"
    assert [file.name for file in run.rollout_files()] == ["step-000001.parquet", "step-000003.parquet"]
    rows = pq.read_table(run.rollout_files()[0]).to_pylist()
    assert len(rows) == 2 * 8
    assert sum(row["selected"] for row in rows) == 2 * 4
    assert rows[0]["completion"] in build_report(tmp_path / "run").html.read_text("utf-8")


SAVING = {"save_strategy": "steps", "save_steps": 2}


def recorded(trainer, path, **options):
    """Add a run directory to a trainer, and return the trainer."""
    trainer.add_callback(RunDirectory(trainer, path, **options))
    return trainer


def contents(path):
    """The bytes of every file of a run, without its lock."""
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock"}


def test_a_resumed_script_continues_its_directory(make_trainer, tmp_path):
    run = tmp_path / "run"
    recorded(make_trainer(max_steps=3, **SAVING), run, rollouts_every=1).train()
    token = token_of(run)
    seconds = [row["seconds"] for row in Run(run).metrics]
    again = recorded(make_trainer(max_steps=4, **SAVING), run, rollouts_every=0)
    before = contents(run)
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        again.train()
    assert contents(run) == before
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [row["step"] for row in Run(run).metrics] == [1, 2, 3, 4]
    assert [row["seconds"] for row in Run(run).metrics][:2] == seconds[:2]
    assert Run(run).metrics[2]["seconds"] > seconds[1]
    assert len(Run(run).rollout_files()) == 2
    assert Run(run).state == "finished"
    assert token_of(run) == token


@pytest.mark.slow
def test_no_training_continues_the_run_of_another(make_trainer, tmp_path):
    """The same script, settings and policy: only the token says that the checkpoint is of another run."""
    recorded(make_trainer(max_steps=4, **SAVING), tmp_path / "other").train()
    before = contents(tmp_path / "other")
    saved = tmp_path / "out"
    saved.rename(tmp_path / "out-of-other")
    recorded(make_trainer(max_steps=2, **SAVING), tmp_path / "mine").train()
    confused = make_trainer(max_steps=6, **SAVING)
    for checkpoint in (True, str(saved / "checkpoint-2")):
        with pytest.raises(UserError, match="other"):
            recorded(confused, tmp_path / "other").train(resume_from_checkpoint=checkpoint)
    assert contents(tmp_path / "other") == before


@pytest.mark.slow
def test_a_run_does_not_continue_with_other_settings(make_trainer, tmp_path):
    run = tmp_path / "run"
    change = {"learning_rate": 2e-3, "num_rollouts": 8}
    recorded(make_trainer(**SAVING), run).train()
    before = contents(run)
    changed = make_trainer(**SAVING, **change | {"max_steps": 3})
    with pytest.raises(UserError, match=r"learning_rate.*num_rollouts"):
        recorded(changed, run).train(resume_from_checkpoint=True)
    assert contents(run) == before
    allowed = make_trainer(**SAVING, **change | {"max_steps": 3})
    recorded(allowed, run, allow_changes=True).train(resume_from_checkpoint=True)
    assert Run(run).config.items() >= change.items()
    assert any("learning_rate" in line for line in Run(run).environment["resumed"])


def test_a_run_of_pods_train_is_neither_continued_nor_overwritten(make_trainer, tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write_config("task: arithmetic\n")
        writer.write_status("stopped")
    before = contents(tmp_path / "run")
    for options in ({}, {"overwrite": True}, {"allow_changes": True}):
        with pytest.raises(UserError, match="pods train"):
            RunDirectory(make_trainer(), tmp_path / "run", **options)
    (tmp_path / "experiment.yaml").write_text("arms: {}\n")
    with pytest.raises(UserError, match="pods compare"):
        RunDirectory(make_trainer(), tmp_path)
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_a_killed_script_without_a_checkpoint_is_refused_or_overwritten(make_trainer, tmp_path):
    run = tmp_path / "run"
    trainer = recorded(make_trainer(), run, rollouts_every=1)
    trainer.train()
    kill(run)
    assert Run(run).state == "killed"
    (run / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="overwrite=True"):
        recorded(make_trainer(), run).train()
    recorded(make_trainer(max_steps=1), run, rollouts_every=0, overwrite=True).train()
    assert (Run(run).state, len(Run(run).metrics), Run(run).rollout_files()) == ("finished", 1, [])
    assert (run / "notes.txt").read_text() == "mine"


def kill(run):
    """Leave what a killed process leaves: a status that says that a process runs, which has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    status = {"state": "running", "step": 1, "process": this_process() | {"pid": ended.pid}}
    (run / "status.json").write_text(json.dumps(status))


def test_a_file_that_no_run_wrote_is_not_overwritten(make_trainer, tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with pytest.raises(UserError, match=r"config\.yaml"):
        RunDirectory(make_trainer(), tmp_path, overwrite=True)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"


def test_a_directory_has_one_writer(make_trainer, tmp_path):
    trainer = make_trainer(**SAVING)
    waiting = RunDirectory(trainer, tmp_path / "run")
    with RunWriter(tmp_path / "run"):
        with pytest.raises(UserError, match="in use"):
            RunDirectory(trainer, tmp_path / "run", overwrite=True)
        trainer.add_callback(waiting)
        with pytest.raises(UserError, match="in use"):
            trainer.train()


@pytest.mark.slow
def test_a_directory_may_begin_with_a_checkpoint_of_another_run_and_has_no_gap(make_trainer, tmp_path):
    """Steps that were trained without the directory would be a gap."""
    recorded(make_trainer(**SAVING), tmp_path / "first").train()
    recorded(make_trainer(max_steps=4, **SAVING), tmp_path / "second").train(resume_from_checkpoint=True)
    assert [row["step"] for row in Run(tmp_path / "second").metrics] == [3, 4]
    assert token_of(tmp_path / "second") not in ("", None, token_of(tmp_path / "first"))
    make_trainer(max_steps=6, **SAVING).train(resume_from_checkpoint=True)
    before = contents(tmp_path / "second")
    with pytest.raises(UserError, match="step 4"):
        recorded(make_trainer(max_steps=8, **SAVING), tmp_path / "second").train(resume_from_checkpoint=True)
    assert contents(tmp_path / "second") == before


def test_a_reward_may_change_the_working_directory(make_trainer, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def reward(completions, **columns):
        os.chdir(tmp_path / "elsewhere")
        return letter_reward(completions)

    trainer = make_trainer(reward=reward, config_class=lambda _, **settings: PODSConfig("out", **settings), **SAVING)
    recorded(trainer, "run", rollouts_every=1).train()
    assert len(Run(tmp_path / "run").metrics) == len(Run(tmp_path / "run").rollout_files()) == 2
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def delete(run):
    shutil.rmtree(run)


def fill_metrics(run):
    """Every later write to the metrics fails as on a full disk."""
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")


@pytest.mark.parametrize("happens", [delete, fill_metrics])
def test_a_directory_that_cannot_be_written_ends_the_training_with_a_checkpoint(make_trainer, tmp_path, happens):
    run = tmp_path / "run"

    def reward(completions, trainer_state, **columns):
        if trainer_state.global_step == 2:
            happens(run)
        return letter_reward(completions)

    trainer = recorded(make_trainer(reward=reward, max_steps=50), run, rollouts_every=1)
    with pytest.raises(UserError, match=str(run)) as error:
        trainer.train()
    assert len(str(error.value).splitlines()) == 1
    step = trainer.state.global_step
    assert step < 6
    assert (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").is_file()


def test_a_full_disk_is_a_users_error(make_trainer, tmp_path, monkeypatch):
    trainer = recorded(make_trainer(**SAVING), tmp_path / "run")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer, "_save_rng_state", full)
    with pytest.raises(UserError, match="No space left"):
        trainer.train()
    assert Run(tmp_path / "run").state == "failed"


def test_settings_of_any_kind_are_written(make_trainer, tmp_path):
    settings = {
        "learning_rate": np.float64(1e-3),
        "num_rollouts": np.int64(8),
        "logging_steps": np.int64(1),
        "scale_rewards": np.str_("group"),
        "mask_truncated_completions": np.bool_(True),
        "reward_weights": np.array([1.0]),
        "beta": torch.tensor(0.5, dtype=torch.float64),
        "lr_scheduler_type": SchedulerType.CONSTANT,
        "lr_scheduler_kwargs": {"path": tmp_path, "set": {2, 1}, "dtype": np.dtype("float32"), "type": np.float32},
    }
    recorded(make_trainer(**SAVING, **settings), tmp_path / "run").train()
    config = Run(tmp_path / "run").config
    assert {"learning_rate": 1e-3, "beta": 0.5, "lr_scheduler_type": "constant"}.items() <= config.items()
    assert config["lr_scheduler_kwargs"]["set"] == [1, 2]
    assert (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").is_file()


def test_settings_are_those_of_now_without_what_follows_from_n_and_m(make_trainer):
    """Such as `skip_zero_advantage_steps`. Arms that differ in the rollouts differ in nothing else."""
    trainer = make_trainer()
    trainer.args.skip_zero_advantage_steps = True
    trainer.args.beta = 0.25
    assert {"skip_zero_advantage_steps": True, "beta": 0.25}.items() <= settings_of(trainer).items()
    assert "generation_batch_size" not in settings_of(trainer)
    plain, pods = (settings_of(make_trainer(num_rollouts=rollouts)) for rollouts in (None, 8))
    assert settings_that_differ(plain, pods) == ["num_rollouts"]


@pytest.mark.slow
def test_several_evaluation_sets_are_kept_apart(make_trainer, dataset, tmp_path):
    sets = {"sums": dataset.select(range(4)), "more/sums": dataset.select(range(4, 8))}
    evaluations = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = recorded(make_trainer(trainer_arguments={"eval_dataset": sets}, **evaluations), tmp_path / "run")
    trainer.train()
    run = Run(tmp_path / "run")
    lines = list(read_jsonl(run.path / "evals.jsonl"))
    assert [(row["step"], row["set"]) for row in lines] == [
        (1, "sums"),
        (1, "more/sums"),
        (2, "sums"),
        (2, "more/sums"),
    ]
    assert [row["step"] for row in run.evals] == [1, 2]
    for row, first, second in zip(run.evals, lines[::2], lines[1::2], strict=True):
        assert row["sums/reward"] == first["reward"]
        assert row["more/sums/reward"] == second["reward"]
        assert row["reward"] == pytest.approx((first["reward"] + second["reward"]) / 2)
    page = build_report(run.path, metric="sums/reward").folder / "report.md"
    assert "sums/reward" in page.read_text("utf-8")
    build_report(run.path)


@pytest.mark.parametrize(("error", "state"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")])
def test_a_script_whose_training_raises_leaves_a_run_that_has_ended(make_trainer, tmp_path, error, state):
    """And that the same process may continue, as a notebook does."""
    broken = True

    def judge(completions, trainer_state, **columns):
        if broken and trainer_state.global_step == 1:
            raise error("no judge")
        return letter_reward(completions)

    trainer = make_trainer(reward=judge, save_strategy="steps", save_steps=1)
    trainer.add_callback(RunDirectory(trainer, tmp_path / "run"))
    with pytest.raises(error, match="no judge"):
        trainer.train()
    run = Run(tmp_path / "run")
    assert (run.state, run.step, len(run.metrics)) == (state, 1, 1)
    assert "no judge" in run.status["reason"]
    broken = False
    trainer.train(resume_from_checkpoint=True)
    run = Run(tmp_path / "run")
    assert (run.state, run.step, len(run.metrics)) == ("finished", 2, 2)


def test_another_trainer_is_refused(make_trainer, tmp_path):
    args = PODSConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    for trainer in (Trainer(model=torch.nn.Linear(1, 1), args=args), make_trainer(PrefixTreeTrainer)):
        with pytest.raises(TypeError, match="PODSTrainer"):
            RunDirectory(trainer, tmp_path / "run")


def scaled(factor):
    def scaled_reward(completions, **columns):
        return [factor * reward for reward in letter_reward(completions)]

    return scaled_reward


@pytest.mark.slow
def test_a_run_does_not_continue_with_other_data_or_another_reward_of_the_same_name(make_trainer, dataset, tmp_path):
    run = tmp_path / "run"
    recorded(make_trainer(reward=scaled(1.0), **SAVING), run).train()
    again = script_contents(make_trainer(reward=scaled(1.0)))
    assert again == Run(run).environment["contents"]
    assert set(again) == {"prompts", "reward_funcs", "modules"}
    before = contents(run)
    for change, named in (
        ({"reward": scaled(2.0)}, "reward_funcs"),
        ({"reward": scaled(1.0), "train_dataset": dataset.select(range(1, 32))}, "prompts"),
    ):
        with pytest.raises(UserError, match=named):
            recorded(make_trainer(**change, **SAVING), run).train(resume_from_checkpoint=True)
        assert contents(run) == before
        recorded(make_trainer(**change), tmp_path / named).train()
        assert why_incomparable([Run(run)], [Run(tmp_path / named)])
    recorded(make_trainer(reward=scaled(1.0)), tmp_path / "same").train()
    assert not why_incomparable([Run(run)], [Run(tmp_path / "same")])
