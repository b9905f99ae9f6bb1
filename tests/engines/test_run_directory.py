"""A script with PODSTrainer writes a run directory that `pods report` reads."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Trainer

from pods_rl import PODSConfig, RunDirectory
from pods_rl.errors import UserError
from pods_rl.report import build_report
from pods_rl.runs import Run

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
    page = build_report(tmp_path / "run").folder / "report.html"
    assert rows[0]["completion"] in page.read_text("utf-8")


def test_a_resumed_script_continues_its_directory(make_trainer, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = make_trainer(max_steps=3, **saving)
    first.add_callback(RunDirectory(first, tmp_path / "run", rollouts_every=1))
    first.train()
    seconds = [row["seconds"] for row in Run(tmp_path / "run").metrics]
    again = make_trainer(max_steps=4, **saving)
    again.add_callback(RunDirectory(again, tmp_path / "run", rollouts_every=0))
    with pytest.raises(UserError, match=str(tmp_path / "run")):
        again.train()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = Run(tmp_path / "run")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert [row["seconds"] for row in run.metrics][:2] == seconds[:2]
    assert run.metrics[2]["seconds"] > seconds[1]
    assert len(run.rollout_files()) == 2
    assert run.state == "finished"


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


def test_another_trainer_is_refused(tmp_path):
    args = PODSConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(TypeError, match="PODSTrainer"):
        RunDirectory(Trainer(model=torch.nn.Linear(1, 1), args=args), tmp_path / "run")
