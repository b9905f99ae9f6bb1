"""TRL's model card with the run's evaluations, and the push of the final policy by transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pods_rl.runs import Run, RunWriter
from pods_rl.training.publishing import add_table_to_cards, push

CARD = """# Model Card for run
This model is a fine-tuned version of [None](https://huggingface.co/None).
generator = pipeline("text-generation", model="None")
"""


@pytest.fixture
def run(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write_config("num_rollouts: 8\nnum_generations: 2\n")
        writer.append_eval({"step": 0, "seconds": 0.0, "accuracy": 0.25, "accuracy_se": None})
    return tmp_path / "run"


def card(run, tmp_path, model: str) -> str:
    def write(model_name, *_):
        (tmp_path / "README.md").write_text(CARD.replace("run", model_name))

    trainer = SimpleNamespace(
        create_model_card=write, is_world_process_zero=lambda: True, args=SimpleNamespace(output_dir=tmp_path)
    )
    add_table_to_cards(trainer, run, model)
    trainer.create_model_card("checkpoints")
    return (tmp_path / "README.md").read_text()


def test_a_card_names_the_run_and_has_its_evaluations(run, tmp_path):
    text = card(run, tmp_path, "Qwen/Qwen2.5-3B")
    assert "Model Card for run" in text
    assert "fine-tuned version of Qwen/Qwen2.5-3B." in text
    assert "8 rollouts a prompt, 2 trained" in text
    assert "| 0 | 0 | 0.25 | - | - |" in text
    assert "None" not in text


def test_a_card_shows_no_local_path(run, tmp_path):
    assert "fine-tuned version of tiny." in card(run, tmp_path, "/home/me/models/tiny")


def test_a_run_without_an_evaluation_has_trl_s_card(run, tmp_path):
    (run / "evals.jsonl").unlink()
    assert "Evaluation" not in card(run, tmp_path, "tiny")
    assert Run(run).evals == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_final_policy_is_pushed_and_a_failure_is_a_warning(tmp_path, capsys, fails):
    pushed = []

    def push_to_hub():
        if fails:
            raise OSError("the hub is full")
        pushed.append((trainer.args.output_dir, trainer.args.hub_model_id))

    trainer = SimpleNamespace(push_to_hub=push_to_hub, args=SimpleNamespace(output_dir="before", hub_model_id=None))
    push(trainer, tmp_path, "sums/pods seed-1")
    assert pushed == [] if fails else [(str(tmp_path), "sums-pods-seed-1")]
    assert ("the hub is full" in capsys.readouterr().err) == fails
    assert trainer.args.output_dir == "before"
