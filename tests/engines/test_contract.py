"""What we override in TRL, pinned: an upgrade that moves one of these seams fails here, not in a run."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

from pods_rl import PODSTrainer
from pods_rl.engines.trl import compat
from pods_rl.engines.trl.compat import SIGNATURES, TESTED, UNSCORED_WARNING, check_overrides
from pods_rl.errors import UserError

from .. import DEADLINE


@pytest.mark.parametrize("method", sorted(SIGNATURES))
def test_overridden_signatures(method):
    assert ", ".join(inspect.signature(getattr(GRPOTrainer, method)).parameters) == SIGNATURES[method]


def test_every_overridden_method_is_in_the_table():
    """A new override needs its entry, or a change of its signature would pass unseen."""
    ours = PODSTrainer.__mro__[: PODSTrainer.__mro__.index(GRPOTrainer)]
    defined = {name for cls in ours for name, value in vars(cls).items() if inspect.isfunction(value)}
    assert {name for name in defined if hasattr(GRPOTrainer, name)} - {"__init__"} == set(SIGNATURES)


def test_the_tested_versions_are_the_ones_that_are_installed_in_development():
    pins = Path(__file__).parents[2].joinpath("constraints.txt").read_text()
    assert all(f"\n{package}=={version}\n" in pins for package, version in TESTED.items())


def moved(self, prompts, images):
    """TRL's `_generate` as a later version might have it."""


@pytest.mark.parametrize(
    ("method", "change"), [("_generate", moved), ("_get_grad_norm", None), ("log", lambda s: None)]
)
def test_a_method_that_takes_other_arguments_is_refused_at_construction(make_trainer, monkeypatch, method, change):
    owner = next(cls for cls in GRPOTrainer.__mro__ if method in vars(cls))
    if change is None:
        monkeypatch.delattr(owner, method)
        found = "that method does not exist"
    else:
        monkeypatch.setattr(GRPOTrainer, method, change)
        found = f"it is {method}({', '.join(inspect.signature(change).parameters)})"
    check_overrides.cache_clear()
    with pytest.raises(UserError) as refused:
        make_trainer()
    text = str(refused.value)
    assert text.startswith(f"PODSTrainer overrides GRPOTrainer.{method}({SIGNATURES[method]}), but in trl ")
    assert found in text
    assert "pip install 'trl==1.16.0' 'transformers==5.23.0'" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_step", "uses GRPOTrainer._step, but in trl .* that attribute does not exist"),
        ("_tr_loss", "uses GRPOTrainer._tr_loss, but in trl .* that attribute does not exist"),
        ("gather", "patches or calls trl.trainer.grpo_trainer.gather, but in trl .* that name does not exist"),
    ],
)
def test_a_private_name_that_is_gone_is_refused_at_construction(make_trainer, monkeypatch, name, words):
    if name == "_tr_loss":  # set in training, so looked for in the method that sets it
        monkeypatch.setitem(compat._SET_LATER, name, GRPOTrainer._prepare_inputs)
    elif name == "gather":
        monkeypatch.delattr(grpo_trainer, name)
    else:
        build = GRPOTrainer.__init__
        monkeypatch.setattr(
            GRPOTrainer, "__init__", lambda self, **given: (build(self, **given), delattr(self, name))[0]
        )
        monkeypatch.setitem(compat._SET_LATER, "_last_loaded_step", build)
    with pytest.raises(UserError, match=words):
        make_trainer()


def test_only_the_compatibility_module_names_what_is_not_public():
    folder = Path(compat.__file__).parent
    private = re.compile(r"(from|import) (trl\.|transformers\.trainer)")
    found = {path.name for path in folder.glob("*.py") if private.search(path.read_text())}
    assert found == {"compat.py"}


def test_names_of_our_own_are_free_in_trl(make_trainer):
    trl = make_trainer(GRPOTrainer, GRPOConfig)
    ours = set(vars(make_trainer())) - set(vars(trl))
    assert {"_rewards", "_stability", "_update", "_resume", "_dynamic", "_tools"} == ours
    inherited = {name for name in vars(PODSTrainer) if hasattr(trl, name)} - set(SIGNATURES) - set(vars(object))

    class Empty:
        """What Python gives every class; 3.13 gives more than 3.11."""

    assert inherited - set(vars(Empty)) - {"__annotations__", "_tag_names", "_name", "_paper"} == set()


# -- the constructor -----------------------------------------------------------------------------------------------


def test_the_constructor_takes_what_trl_s_takes():
    def shape(cls):
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shape(PODSTrainer) == shape(GRPOTrainer)
    annotations = PODSTrainer.__init__.__annotations__
    assert set(annotations) == {name for name, *_ in shape(PODSTrainer)} - {"self"} | {"return"}
    assert annotations["args"] == "PODSConfig | None"


SNIPPET = """
from pods_rl import PODSConfig, PODSTrainer, select
def keep(rewards, m, *, generator=None): return rewards
PODSTrainer("a model", args=PODSConfig("out", num_rollouts=8, learning_rate=0.1, rule=keep))
PODSTrainer(modle=1)
PODSTrainer("a model", args=3)
"""


# Without the libraries below ours, whose reading takes most of the time.
MYPY = """
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.*,trl.*,datasets.*,accelerate.*,peft.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


@pytest.mark.slow
def test_mypy_refuses_arguments_that_do_not_exist(tmp_path):
    """In a user's own project."""
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(lines) == 2, done.stdout
    assert 'snippet.py:5: error: Unexpected keyword argument "modle" for "PODSTrainer"' in lines[0]
    assert 'expected "PODSConfig | None"' in lines[1]


# -- what we read in TRL's source ----------------------------------------------------------------------------------


def test_how_an_epoch_is_run():
    """By keyword, of which we read three; the random state is read once the lost counters were set to nothing."""
    names = inspect.signature(GRPOTrainer._run_epoch).parameters
    assert {"epoch", "epochs_trained", "resume_from_checkpoint"} <= names.keys()
    loop = inspect.getsource(GRPOTrainer._inner_training_loop)
    for name in ("self._tr_loss =", "self._globalstep_last_logged ="):
        assert loop.index("self._init_training_state(") < loop.index(name) < loop.index("self._run_epoch(")
    assert inspect.getsource(GRPOTrainer._run_epoch).count("self._load_rng_state(") == 2


def test_an_epoch_s_order_is_drawn_when_its_first_prompt_is():
    """What `_run_epoch` relies on to bring a sampler to where earlier epochs left it."""
    orders = (
        RepeatSampler(range(50), mini_repeat_count=1, seed=3),
        RepeatSampler(range(50), mini_repeat_count=1, seed=3),
    )
    first, _ = list(orders[0]), next(iter(orders[1]))
    second = list(orders[0])
    assert list(orders[1]) == second != first


def test_what_generate_returns():
    """Eight values, of which we index each list by row and read the completions' ids and texts."""
    source = inspect.getsource(GRPOTrainer._generate)
    order = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert f"return {order}" in source


def test_what_is_gathered_while_rollouts_are_unevenly_shared():
    """The two names that `gathering_with` replaces, and nothing else that talks to other processes."""
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assert source.count(" gather(") == 1
    assert "self.accelerator" not in source.replace("self.accelerator.device", "")
    assert grpo_trainer.gather is accelerate.utils.gather
    source = inspect.getsource(GRPOTrainer._generate).split("if self.tools:")
    assert source[1].count("self.accelerator.gather(") == 3
    assert "gather(" not in source[0]


def test_what_fast_generators_are_built_and_kept_in_step_by():
    """`vllm_sequences` replaces the name and one keyword; a skipped step moves the tag of the loaded weights."""
    source = inspect.getsource(GRPOTrainer.__init__)
    assert source.count("VLLMGeneration(") == source.count("max_num_seqs=") == 1
    call = source.split("VLLMGeneration(")[1].split("self._last_loaded_step = -1")[0]
    assert all("=" in line or line.strip() in (")", "") or "*" in line or "#" in line for line in call.splitlines())
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "if self.state.global_step != self._last_loaded_step:" in source
    assert "unwrapped_model.to(torch.bfloat16)" in source  # why float32 weights are refused there


def test_accelerate_drops_fsdp_on_the_cpu_where_we_put_it_back():
    """`use_fsdp2` is needed as long as the branch that takes the plugin leaves the CPU out."""
    source = inspect.getsource(accelerate.state.AcceleratorState.__init__)
    takes = source[: source.index("self.fsdp_plugin = fsdp_plugin")]
    assert "MULTI_CPU" not in takes[takes.rindex("elif self.distributed_type in [") :]
    assert 'PartialState._shared_state["distributed_type"] = self.distributed_type' in source


def test_rewards_are_asked_for_once_and_after_generation():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("self._calculate_rewards(") == 1
    assert source.index("self._generate(") < source.index("self._calculate_rewards(")


def test_the_warning_that_we_drop_is_the_one_that_prints_a_completion():
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assert source.count("logger.warning(") == 1
    assert f'f"{UNSCORED_WARNING} for the following kwargs' in source
    assert isinstance(grpo_trainer.logger.logger, logging.Logger)


def test_every_step_s_gradient_norm_is_taken_before_the_callbacks_that_may_clear_it():
    source = inspect.getsource(Trainer._run_epoch)
    order = ["self._get_grad_norm(", "on_pre_optimizer_step(", "self.optimizer.step()", "self.state.global_step += 1"]
    order += ["on_step_end(", "self._maybe_log_save_evaluate("]
    assert [source.index(name) for name in order] == sorted(source.index(name) for name in order)


def test_a_checkpoint_is_written_and_rotated_where_the_output_is():
    """All of it under `_get_output_dir`, which we move; and what we do not write is never read."""
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "run_dir = self._get_output_dir(trial=trial)" in source
    assert "output_dir = os.path.join(run_dir, checkpoint_folder)" in source
    assert "output_dir=run_dir" in source.split("rotate_checkpoints(")[1]
    assert "self._get_output_dir(trial=trial)" in inspect.getsource(GRPOTrainer._save_checkpoint)
    reads = inspect.getsource(Trainer._load_from_checkpoint) + inspect.getsource(Trainer._inner_training_loop)
    assert "TRAINING_ARGS_NAME" not in reads


def test_buffer_and_names_we_read(make_trainer):
    trainer = make_trainer(num_rollouts=8)
    for name in (
        "_buffered_inputs", "_step", "_metrics", "_logs", "_pending_extra_logs", "reward_func_names", "reward_weights",
        "multi_objective_aggregation", "scale_rewards", "top_entropy_quantile", "aux_loss_enabled", "num_generations",
        "_entropy_bonus_enabled", "pad_to_multiple_of", "use_vllm", "loss_type",
        "num_iterations", "log_completions",
    ):  # fmt: skip
        assert hasattr(trainer, name), name
        assert name in compat.TRLTrainer.__annotations__, name
