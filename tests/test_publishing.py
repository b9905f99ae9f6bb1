"""The model card of a run, and the push of its policy to a hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from pods_rl.errors import UserError
from pods_rl.recipe import load_recipe
from pods_rl.report.card import model_card
from pods_rl.runs import Run, RunWriter
from pods_rl.training.publishing import policy_files, push_finished, repository_name

from .cli import pods
from .fake_hub import fake_hub

STORED = Path(__file__).parent / "stored" / "whole"


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture
def run(tmp_path):
    """A stored run as run 3 of an arm, with files beside its policy that nobody should get."""
    place = tmp_path / "sums" / "pods" / "seed-3"
    shutil.copytree(STORED, place)
    final = place / "checkpoints" / "final"
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt", "log.txt", "notes.md", ".netrc"):
        (final / name).write_text("/home/me/secret")
    (final / "linked.json").symlink_to("/etc/hostname")
    return place


def test_only_weights_configurations_and_tokenizer_are_pushed(hub, run):
    result = pods("card", run, "--push")
    ((place, files),) = hub.commits
    assert place == "me/sums-pods-seed-3/main"
    assert set(files) == {
        "README.md", "accuracy.png", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert files["model.safetensors"] == (run / "checkpoints/final/model.safetensors").read_bytes()
    assert files["README.md"].decode() == model_card(Run(run))[0]
    assert hub.problems == []
    assert result.output == f"pushed: {hub.address}/me/sums-pods-seed-3\n"


def test_a_repository_may_be_named(hub, run):
    pods("card", run, "--push", "--repo", "team/policy")
    assert hub.created[0]["organization"] == "team"
    assert hub.commits[0][0] == "team/policy/main"


def test_a_failed_push_is_a_warning_with_the_command_to_repeat(hub, run, capsys):
    hub.fails = 500
    push_finished(load_recipe("tiny-pods", {"push_to_hub": True, "hub_model_id": "me/mine"}), Run(run))
    said = " ".join(capsys.readouterr().err.split())
    assert "Not pushed to the hub:" in said
    assert f"The run is complete. Push it with: pods card {run} --push" in said
    with pytest.raises(UserError, match=r"Not pushed: .*the disk of the hub is full"):
        pods("card", run, "--push")
    assert hub.commits == []


def test_a_stopped_run_is_not_pushed(hub, run):
    with RunWriter(run, resume=True) as writer:
        writer.write_status("stopped", reason="SIGTERM")
    push_finished(load_recipe("tiny-pods", {"push_to_hub": True}), Run(run))
    assert hub.created == []


def test_what_cannot_be_pushed_is_refused(hub, run, monkeypatch):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="has no final policy to push"):
        pods("card", run, "--push")
    with pytest.raises(UserError, match="--repo me/x names where to push: add --push"):
        pods("card", run, "--repo", "me/x")
    with pytest.raises(UserError, match="hub_strategy cannot be set in a recipe: a run pushes its final policy once"):
        load_recipe("tiny-pods", {"hub_strategy": "checkpoint"})
    assert hub.created == []


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("x", "x"),
        ("a b", "a-b"),
        ("ü", "pods-run"),
        ("--..--", "pods-run"),
        ("a..b--c.git", "a-b-c"),
        ("x" * 99, "x" * 96),
    ],
)
def test_a_repository_has_a_name_that_the_hub_allows(tmp_path, name, repository):
    assert repository_name(Run(tmp_path / name)) == repository


def test_the_card_says_what_was_done(run):
    text, figure = model_card(Run(run))
    head = yaml.safe_load(text.split("---")[1])
    assert head["tags"] == ["grpo", "pods", "reinforcement-learning", "trl"]
    assert "license" not in head
    assert "base_model" not in head  # a local policy
    assert "n = 6 rollouts a prompt and trains on m = 4 of them, chosen by the rule max\\_variance" in text
    assert "arxiv.org/abs/2504.13818" in text
    assert "| 6 | 1 | 0.000 ± 0.000 |" in text
    assert "pip install pods-rl==0.1.0" in text
    assert figure.startswith(b"\x89PNG")


def test_hostile_text_stays_text_and_local_paths_stay_here(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {
        "model_name_or_path": "/home/me/models/[x](y)<script>",
        "data_dir": "/home/me/data",
        "system_prompt": "```\n</details><script>alert(1)</script>\n\x1b[31m---\nlicense: mit",
        "dataset_name": "a\nlicense: mit",
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text, _ = model_card(Run(run))
    head, body, recipe = text.partition("\n# ")[0], text.partition("\n# ")[2], text.partition("````yaml")[2]
    assert "license" not in head
    assert "datasets" not in head
    assert "/home/me" not in text
    assert "\x1b" not in text
    assert "\\[x\\](y)&lt;script&gt;, trained on" in body
    assert "<script>" not in body.partition("````yaml")[0]
    assert recipe.count("````") == 1  # the fence is longer than any in the text


def test_the_card_is_written_without_a_push(run, tmp_path):
    pods("card", run)
    assert sorted(path.name for path in (run / "card").iterdir()) == ["README.md", "accuracy.png"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Cannot write to .*file.*Choose a directory with --output"):
        pods("card", run, "--output", tmp_path / "file")


def test_a_run_that_just_started_has_a_card(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write_config("seed: 1\n")
    text, figure = model_card(Run(tmp_path / "run"))
    assert figure is None
    assert "## Evaluation" not in text


def test_manifests_stay_here(run):
    assert json.loads((run / "checkpoints/final/manifest.json").read_text())
    assert "manifest.json" not in [path.name for path in policy_files(run / "checkpoints/final")]
