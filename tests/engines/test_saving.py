"""What the trainer of a run saves: TRL's own files, in one move, without its pickle; and what a failed save leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.errors import UserError
from pods_rl.runs.checkpoints import MANIFEST, read_manifest, verify
from pods_rl.training.saving import RunTrainer

from .test_dynamic_sampling import dead_for_half


@pytest.fixture
def make_trainer(make_trainer):
    """Builds the trainer of `pods train`, unless another one is asked for."""

    def make(trainer_class=RunTrainer, *given, **config):
        return make_trainer(trainer_class, *given, **config)

    return make


pytestmark = pytest.mark.slow  # complete runs


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_has_trls_files_and_a_manifest(make_trainer, tmp_path):
    trl = make_trainer(trainer_class=GRPOTrainer, config_class=GRPOConfig, max_steps=1)
    trl.train()
    trl._save_checkpoint(trl.model, None)
    expected = files(tmp_path / "out/checkpoint-1") - {"training_args.bin"} | {"manifest.json", "pods_state_0.json"}

    ours = make_trainer(max_steps=2, save_total_limit=1)
    ours.recipe_keys = {"seed": 3}
    ours.train()
    ours._save_checkpoint(ours.model, None)
    folder = tmp_path / "out/checkpoint-2"
    assert files(folder) == expected
    assert verify(folder) == []
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["processes"], manifest["recipe"]["keys"]) == (2, 1, {"seed": 3})
    assert (tmp_path / "out/checkpoint-1").exists()  # TRL's is not ours to prune
    assert not (tmp_path / "out/.saving").exists()


def test_what_fails_half_way_leaves_what_was_there(make_trainer, tmp_path):
    trainer, target = make_trainer(), tmp_path / "out/final"

    def write(folder):
        (folder / "weights").write_text("whole")

    def fail(folder):
        (folder / "weights").write_text("ha")
        raise OSError(28, "No space left on device")

    trainer.publish_folder(target, write)
    with pytest.raises(OSError, match="No space left"):
        trainer.publish_folder(target, fail)
    assert (target / "weights").read_text() == "whole"
    assert verify(target) == []
    assert not (tmp_path / "out/.saving").exists()


# ------------------------------------------------------------------------------------------- the best checkpoint

SCORES = {1: 0.2, 2: 0.9, 3: 0.1, 4: 0.4}  # of the evaluation after each step: step 2 is the best


class _Scripted:
    """Evaluations with given scores."""

    def evaluate(self, *_, **__):
        metrics = {"eval_score": SCORES[self.state.global_step]}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class ScriptedTRL(_Scripted, GRPOTrainer):
    pass


class ScriptedPODS(_Scripted, RunTrainer):
    pass


class Watcher(TrainerCallback):
    """What callbacks see when a checkpoint was saved, and at the end."""

    def __init__(self):
        self.saved, self.at_end = {}, None

    def on_save(self, args, state, control, **_):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.saved[state.global_step] = (files(folder) - {MANIFEST, "pods_state_0.json"}, state.best_model_checkpoint)

    def on_train_end(self, args, state, control, **_):
        self.at_end = (kept(args.output_dir), state.best_model_checkpoint)


def kept(place):
    return sorted(path.name for path in Path(place).glob("checkpoint-*"))


def train_scripted(make_trainer, dataset, ours, resume=None, **config):
    """A run that evaluates each step; what it kept and said, and its final weights."""
    watcher = Watcher()
    trainer = make_trainer(
        trainer_class=ScriptedPODS if ours else ScriptedTRL,
        config_class=PODSConfig if ours else GRPOConfig,
        trainer_arguments={"eval_dataset": dataset.select(range(4)), "callbacks": [watcher]},
        **{"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
           "load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True} | config,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    saved = {step: (seen - {"training_args.bin"}, best) for step, (seen, best) in watcher.saved.items()}
    states = {
        name: json.loads(Path(trainer.args.output_dir, name, "trainer_state.json").read_text())["best_model_checkpoint"]
        for name in kept(trainer.args.output_dir)
        if Path(trainer.args.output_dir, name, MANIFEST).is_file() or not ours
    }
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return (kept(trainer.args.output_dir), trainer.state.best_model_checkpoint, saved, watcher.at_end, states), weights


@pytest.mark.parametrize(
    ("num_rollouts", "config"),
    [
        (4, {"save_total_limit": 1}),
        (4, {"save_total_limit": 2}),
        (4, {}),
        (8, {"save_total_limit": 1}),
        (4, {"save_total_limit": 1, "load_best_model_at_end": False}),
        (4, {"save_strategy": "best", "save_total_limit": 2}),
        (4, {"save_total_limit": 3, "greater_is_better": False}),
        (4, {"save_total_limit": 1, "save_only_model": True}),
        (4, {"save_total_limit": 1, "save_steps": 2}),
    ],
)
def test_the_best_checkpoint_is_kept_named_and_loaded_as_trl_does(
    make_trainer, dataset, tmp_path, num_rollouts, config
):
    expected, _ = train_scripted(make_trainer, dataset, False, **config)
    shutil.rmtree(tmp_path / "out")
    found, our_weights = train_scripted(make_trainer, dataset, True, num_rollouts=num_rollouts, **config)
    assert found == expected
    assert str(tmp_path / "out/checkpoint-") in found[1]
    if config.get("load_best_model_at_end", True):
        best = load_file(Path(found[1], "model.safetensors"))
        assert all(torch.equal(value, our_weights[name]) for name, value in best.items())


def test_a_resumed_run_knows_the_best_checkpoint(make_trainer, dataset, tmp_path):
    limit = {"save_total_limit": 2}
    whole, _ = train_scripted(make_trainer, dataset, True, **limit)
    shutil.rmtree(tmp_path / "out")
    train_scripted(make_trainer, dataset, True, max_steps=3, lr_scheduler_type="constant", **limit)
    assert kept(tmp_path / "out") == ["checkpoint-2", "checkpoint-3"]
    resumed, _ = train_scripted(make_trainer, dataset, True, resume=True, lr_scheduler_type="constant", **limit)
    assert (resumed[0], resumed[1]) == (whole[0], whole[1]) == (["checkpoint-2", "checkpoint-4"], resumed[1])


def test_what_is_not_ours_outlives_a_run(make_trainer, dataset, tmp_path):
    """transformers' own rotation at the end of a run takes `checkpoint-6-keep` for one of its own."""
    for name in ("checkpoint-best", "checkpoint-6-keep", "checkpoint-1.bak", "checkpoint-3"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "mine").touch()
    (tmp_path / "out/checkpoint-notes.txt").touch()
    (tmp_path / "out/checkpoint-4").symlink_to(tmp_path / "nowhere")
    train_scripted(make_trainer, dataset, True, save_total_limit=1)
    assert kept(tmp_path / "out") == [
        "checkpoint-1.bak", "checkpoint-2", "checkpoint-3.kept-1", "checkpoint-4.kept-1", "checkpoint-6-keep",
        "checkpoint-best", "checkpoint-notes.txt",
    ]  # fmt: skip
    assert (tmp_path / "out/checkpoint-3.kept-1/mine").is_file()


def test_a_subclass_s_output_dir_is_used(make_trainer, tmp_path):
    class Elsewhere(RunTrainer):
        def _get_output_dir(self, trial):
            return str(tmp_path / "elsewhere")

    make_trainer(trainer_class=Elsewhere, save_strategy="steps", save_steps=1, save_total_limit=1).train()
    assert kept(tmp_path / "elsewhere") == ["checkpoint-2"]
    assert verify(tmp_path / "elsewhere/checkpoint-2") == []
    assert not (tmp_path / "elsewhere/.saving").exists()


# ---------------------------------------------------------------------------------------- resuming by hand


def test_a_torn_checkpoint_is_refused_however_it_is_torn(make_trainer, tmp_path):
    """Each file missing, empty, cut and with one bit flipped; a path is refused, and True takes the one before."""
    make_trainer(save_strategy="steps", save_steps=1).train()
    good, folder = tmp_path / "out/checkpoint-1", tmp_path / "out/checkpoint-2"
    spoilt = 0
    trainer = make_trainer(max_steps=3)
    for name in sorted(files(folder) - {MANIFEST}):  # TRL's own checkpoints have none
        whole = (folder / name).read_bytes()
        flipped = bytes([whole[0] ^ 1]) + whole[1:]
        for content in (None, b"", whole[: len(whole) // 2], flipped):
            (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
            problem = r"resume_from_checkpoint = .*checkpoint-2: .*(bytes|missing|hash|trainer_state)"
            with pytest.raises(UserError, match=problem):
                trainer.train(resume_from_checkpoint=str(folder))
            spoilt += 1
        assert trainer._resume._find(True)[0] == good, name
        (folder / name).write_bytes(whole)
    assert spoilt >= 40
    assert verify(folder) == []
    (folder / "optimizer.pt").unlink()
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 1


def test_any_text_and_any_path_is_saved_and_resumed_from(make_trainer, tmp_path):
    odd = str(tmp_path / "out\udcff")
    for steps in (1, 2):
        trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=1)
        trainer.args.output_dir, trainer.recipe_keys = odd, {"dataset_name": "rows\udcff.jsonl"}
        trainer.args.max_steps = steps
        trainer.train(resume_from_checkpoint=steps == 2)
    assert trainer._initial_global_step == 1
    assert verify(Path(odd, "checkpoint-2")) == []
    assert read_manifest(Path(odd, "checkpoint-2"))["recipe"]["keys"] == {"dataset_name": "rows\udcff.jsonl"}


@pytest.mark.parametrize("wanted", [True, "nowhere", "file"])
def test_what_is_not_a_checkpoint_is_refused(make_trainer, tmp_path, wanted):
    (tmp_path / "file").touch()
    given = wanted if wanted is True else str(tmp_path / wanted)
    with pytest.raises(UserError, match=r"No valid checkpoint found|there is no trainer_state.json"):
        make_trainer().train(resume_from_checkpoint=given)


# -- the library's checkpoints ---------------------------------------------------------------------------------------


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def test_the_library_resumes_its_own_checkpoints_bit_for_bit(make_trainer, tmp_path):
    """In the middle of a generation, in the second epoch, with further prompts drawn."""
    schedule = {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 16, "max_steps": 10}
    config = schedule | {"num_rollouts": 8, "save_strategy": "steps", "save_steps": 3, "dynamic_sampling": True}
    config |= {"reward": dead_for_half}
    whole = make_trainer(PODSTrainer, **config)
    whole.train()
    assert not (tmp_path / "out/checkpoint-9" / MANIFEST).exists()
    resumed = make_trainer(PODSTrainer, **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-3"))
    assert resumed._dynamic.prompts.drawn == whole._dynamic.prompts.drawn > 0
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.rollouts.columns() == whole.rollouts.columns()
    shutil.rmtree(tmp_path / "out/checkpoint-10", ignore_errors=True)
    (tmp_path / "out/checkpoint-9/trainer_state.json").unlink()  # killed while it was saved
    last = make_trainer(PODSTrainer, **config)
    assert last._resume.find(True) == str(tmp_path / "out/checkpoint-6")


def test_a_checkpoint_of_trl_s_trainer_is_resumed(make_trainer, tmp_path, caplog):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    theirs = make_trainer(GRPOTrainer, GRPOConfig, **config)
    theirs.train()
    ours = make_trainer(PODSTrainer, num_rollouts=8, **config)
    ours.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert ours.state.global_step == 4
    assert "resumed as TRL does" in caplog.text
