"""What PODSTrainer saves: TRL's own files, in one move, without its pickle; and what a failed save leaves."""

from __future__ import annotations

import pytest
from trl import GRPOConfig, GRPOTrainer

from pods_rl.runs.checkpoints import read_manifest, verify


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
    assert not (tmp_path / "out/checkpoint-1").exists()  # one is kept
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
