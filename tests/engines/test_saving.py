"""What the trainer of a run saves, and what it resumes from: TRL's own files, in one move, without its pickle."""

import shutil

import pytest
from trl import GRPOConfig, GRPOTrainer

from pods_rl.errors import UserError
from pods_rl.runs.checkpoints import MANIFEST, verify
from pods_rl.runs.files import read_mapping
from pods_rl.training.trainer import RunTrainer

from .conftest import assert_equal_weights
from .test_dynamic_sampling import dead_for_half

pytestmark = pytest.mark.slow  # complete runs


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_has_trls_files_and_a_manifest(make_trainer, tmp_path):
    trl = make_trainer(GRPOTrainer, GRPOConfig, max_steps=1)
    trl.train()
    trl._save_checkpoint(trl.model, None)
    expected = files(tmp_path / "out/checkpoint-1") - {"training_args.bin"} | {"manifest.json", "pods_state_0.json"}

    ours = make_trainer(RunTrainer, max_steps=2, save_total_limit=1)
    ours.recipe_keys = {"seed": 3}
    ours.train()
    ours._save_checkpoint(ours.model, None)
    folder = tmp_path / "out/checkpoint-2"
    assert files(folder) == expected
    assert verify(folder) == []
    manifest = read_mapping(folder / MANIFEST)
    assert (manifest["step"], manifest["processes"], manifest["recipe"]["keys"]) == (2, 1, {"seed": 3})
    assert (tmp_path / "out/checkpoint-1").exists()  # TRL's is not ours to prune
    assert not (tmp_path / "out/.saving").exists()


# -- resuming --------------------------------------------------------------------------------------------------------


def test_an_incomplete_checkpoint_is_refused_and_true_resumes_from_the_one_before(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", save_steps=1).train()
    folder, trainer = tmp_path / "out/checkpoint-2", make_trainer(max_steps=3)
    (folder / "trainer_state.json").unlink()
    (tmp_path / "file").touch()
    for wanted in (folder, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(UserError, match=r"no trainer_state\.json"):
            trainer.train(resume_from_checkpoint=str(wanted))
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 1
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(UserError, match="checkpoint"):
        make_trainer(RunTrainer).train(resume_from_checkpoint=True)


def test_the_library_resumes_its_own_checkpoints_bit_for_bit(make_trainer, tmp_path):
    """In the middle of a generation, in the second epoch, with new prompts drawn."""
    schedule = {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 16, "max_steps": 10}
    config = schedule | {"num_rollouts": 8, "save_strategy": "steps", "save_steps": 3, "dynamic_sampling": True}
    config |= {"reward": dead_for_half}
    whole = make_trainer(**config)
    whole.train()
    assert not (tmp_path / "out/checkpoint-9" / MANIFEST).exists()
    resumed = make_trainer(**config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-3"))
    assert resumed._dynamic.drawn == whole._dynamic.drawn > 0
    assert_equal_weights(resumed, whole)
    assert resumed.rollouts.columns() == whole.rollouts.columns()
    shutil.rmtree(tmp_path / "out/checkpoint-10", ignore_errors=True)
    (tmp_path / "out/checkpoint-9/trainer_state.json").unlink()  # killed while it was saved
    assert make_trainer(**config)._resume.find(True) == str(tmp_path / "out/checkpoint-6")


def test_a_checkpoint_of_trl_s_trainer_is_resumed(make_trainer, tmp_path, caplog):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(GRPOTrainer, GRPOConfig, **config).train()
    ours = make_trainer(num_rollouts=8, **config)
    ours.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert ours.state.global_step == 4
    assert "TRL" in caplog.text
