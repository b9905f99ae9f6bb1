"""The settings on SkyRL's command line: what is read, and what is refused before any process starts."""

import inspect
import re

import pytest
import ray
from skyrl.train.entrypoints import main_base

import pods_rl.engines.skyrl.main as entry
from pods_rl.engines.skyrl.generator import PODSGenerator
from pods_rl.engines.skyrl.settings import GROUP_ESTIMATORS, SkyRLSettings, read_settings
from pods_rl.errors import UserError
from pods_rl.selection import RULES

from .parts import Scripted

REFUSED = [  # overrides, and a key or a value that the error names
    ([], "pods.num_rollouts = None"),
    (["pods=16"], "pods must"),
    (["pods.num_rolouts=16"], "num_rollouts?"),
    (["pods.num_rollouts=3"], "pods.num_rollouts = 3"),
    (["pods.num_rollouts=many"], "pods.num_rollouts = 'many'"),
    (["pods.num_rollouts=8", "pods.rule=max_varience"], "max_variance?"),
    (["pods.num_rollouts=8", "pods.rule=os.path:basename"], "basename"),
    (["pods.num_rollouts=8", "pods.selection=batch"], "pods.selection = batch"),
    (["pods.num_rollouts=8", "pods.selection=all"], "pods.selection = 'all'"),
    (["pods.num_rollouts=8", "pods.seed=1.5"], "pods.seed = 1.5"),
    (["pods.num_rollouts=8", "pods.ledger=3"], "pods.ledger"),
    (["pods.num_rollouts=8", "pods.ledger_every=0"], "pods.ledger_every = 0"),
]


def refusal(config) -> str:
    with pytest.raises(UserError) as caught:
        read_settings(config, config.pods)
    return str(caught.value)


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_work_is_refused(make_config, overrides, message):
    assert message in refusal(make_config(*overrides))


def test_the_settings_of_a_command_line(make_config):
    config = make_config("pods.num_rollouts=16", "pods.rule=percentile", "pods.seed=3", "pods.ledger=rollouts")
    assert read_settings(config, config.pods) == SkyRLSettings(
        num_rollouts=16, num_generations=4, rule=RULES["percentile"], seed=3, ledger="rollouts"
    )
    assert read_settings(make_config("generator.step_wise_trajectories=true"), {"num_rollouts": 4}).step_wise


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_one_kept_trajectory_is_refused_where_kept_trajectories_are_compared(make_config, estimator):
    config = make_config(
        "pods.num_rollouts=8",
        "generator.n_samples_per_prompt=1",
        f"trainer.algorithm.advantage_estimator={estimator}",
    )
    assert f" trainer.algorithm.advantage_estimator={estimator} " in refusal(config)
    config.trainer.algorithm.advantage_estimator = "reinforce++"
    assert read_settings(config, config.pods).num_generations == 1


def test_a_ledger_needs_the_tokenizer(make_config):
    with pytest.raises(UserError, match="tokenizer=tokenizer"):
        PODSGenerator(Scripted(lambda uid, number: 0.0), make_config(), num_rollouts=8, ledger="rollouts")


def test_the_command_line_is_checked_by_skyrl_too():
    with pytest.raises(ValueError, match="pod"):
        entry.read_config(["pod.num_rollouts=8"])


def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys):
    """Also one of Ray's other process, whose text Ray replaces by a traceback."""
    monkeypatch.setattr("sys.argv", ["main", "pods=16"])
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("Error: pods .*16", line)
    remote = ray.exceptions.RayTaskError("train", "Traceback ...", UserError("the ledger")).as_instanceof_cause()
    assert isinstance(remote, UserError)

    def fail(arguments):
        raise remote

    monkeypatch.setattr(entry, "read_config", fail)
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{remote.cause}\n")


def test_skyrls_own_entry_point_leads_to_ours(monkeypatch):
    """By `trainer.override_entrypoint`, which its newer versions know; our configuration need not."""
    words = ["trainer.override_entrypoint=pods_rl.engines.skyrl.main", "pods.num_rollouts=2"]
    with pytest.raises(UserError, match=r"num_rollouts = 2 .* = 5"):
        entry.read_config(words)
    if "override_entrypoint" in inspect.getsource(main_base.main):
        monkeypatch.setattr("sys.argv", ["main_base", *words])
        with pytest.raises(SystemExit):
            main_base.main()
