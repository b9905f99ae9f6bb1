"""What we override in TRL, pinned: an upgrade that moves one of these seams fails here, not in a run."""

import inspect
import re
from pathlib import Path

import pytest
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from pods_rl import PODSTrainer
from pods_rl.engines import TESTED
from pods_rl.engines.trl import compat
from pods_rl.engines.trl.compat import ROW_LISTS, Generated, Layer, TRLTrainer, check_kernel, check_overrides, row_lists
from pods_rl.engines.trl.guarded.trainer import Guarded
from pods_rl.engines.trl.selecting.trainer import Selecting
from pods_rl.engines.trl.step.trainer import PrefixTreeTrainer
from pods_rl.errors import UserError

INSTALL = "pip install " + " ".join(f"'{package}=={version}'" for package, version in TESTED.items())
LAYERS = (Selecting, PrefixTreeTrainer, Guarded)


def overridden(layer):
    methods = {name for name, method in vars(layer).items() if getattr(method, "__override__", False)}
    return methods - set(vars(Layer))


def test_every_overridden_method_is_marked_so_that_its_parameters_are_compared():
    for layer in LAYERS:
        defined = {name for name, value in vars(layer).items() if inspect.isfunction(value)}
        assert {name for name in defined if hasattr(GRPOTrainer, name)} - {"__init__"} == overridden(layer)
        check_overrides(layer)
    assert overridden(Selecting) == {
        *("_generate", "_generate_single_turn", "_generate_and_score_completions"),
        *("get_train_dataloader", "_get_dataloader"),
    }
    assert len(set.union(*map(overridden, LAYERS))) <= 20


def test_every_private_name_that_the_engine_uses_is_in_trl_s_source():
    source = "".join(inspect.getsource(cls) for cls in GRPOTrainer.__mro__[:-1])
    assert [name for name in TRLTrainer.__annotations__ if f"self.{name}" not in source] == []
    assert all(hasattr(grpo_trainer, f"{verb}_pixel_values_by_grid") for verb in ("split", "unsplit"))
    assert "max_num_seqs=" in inspect.getsource(GRPOTrainer.__init__)  # which `room_in_vllm` replaces


def test_the_methods_that_the_engine_calls_exist_and_take_these_parameters():
    declared = {name: method for name, method in vars(TRLTrainer).items() if inspect.isfunction(method)}
    assert declared
    for name, method in declared.items():
        given = inspect.signature(method).parameters.values()
        expected = [parameter.name for parameter in given if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        names = list(inspect.signature(inspect.unwrap(getattr(GRPOTrainer, name))).parameters)
        assert names[: len(expected)] == expected, name


def test_the_tested_versions_are_the_ones_that_are_installed_in_development():
    pins = Path(__file__).parents[2].joinpath("constraints.txt").read_text()
    assert all(f"\n{package}=={version}\n" in pins for package, version in TESTED.items())


def moved(self, prompts, images):
    """TRL's `_generate` as a later version might have it."""


@pytest.mark.parametrize(("method", "change"), [("_generate", moved), ("_get_grad_norm", None)])
def test_a_method_that_takes_other_arguments_is_refused_at_construction(make_trainer, monkeypatch, method, change):
    if change is None:
        monkeypatch.delattr(next(cls for cls in GRPOTrainer.__mro__ if method in vars(cls)), method)
    else:
        monkeypatch.setattr(GRPOTrainer, method, change)
    check_overrides.cache_clear()
    with pytest.raises(UserError) as refused:
        make_trainer()
    text = str(refused.value)
    assert f"GRPOTrainer.{method}({', '.join(inspect.signature(getattr(PODSTrainer, method)).parameters)})" in text
    assert (f"{method}(self, prompts, images)" if change else "does not exist") in text
    assert INSTALL in text


def test_a_trainer_that_another_library_has_put_in_place_of_trl_s_is_refused_with_the_order_of_imports(monkeypatch):
    # A stand-in for Unsloth, which does so on a GPU when it is imported.
    unsloths = type("UnslothGRPOTrainer", (GRPOTrainer,), {"__module__": "UnslothGRPOTrainer"})
    monkeypatch.setattr("pods_rl.engines.trl.compat.GRPOTrainer", unsloths)
    check_overrides.cache_clear()
    with pytest.raises(UserError, match="from pods_rl import PODSConfig, PODSTrainer"):
        check_overrides(PrefixTreeTrainer)


def test_a_trl_whose_only_kernel_needs_a_gpu_is_refused_without_one(monkeypatch):
    """As TRL 1.15: CUDA's torch installs Triton on a CPU too, so that its kernel is there and cannot run."""
    kernel = type("ChunkedLogProbFunction", (), {"__module__": "trl.kernels.chunked_logprob"})
    monkeypatch.delattr("trl.trainer.utils._use_triton", raising=False)
    for found, has_gpu, on_cpu in ((kernel, False, False), (kernel, True, True), (None, True, False)):
        monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", found)
        monkeypatch.setattr("torch.accelerator.is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(UserError, match=r"trl>=1\.16"):
            check_kernel(on_cpu=on_cpu)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", kernel)
    check_kernel(on_cpu=False)


def test_a_list_of_rows_that_trl_no_longer_fills_is_refused_at_construction(make_trainer, monkeypatch):
    monkeypatch.setitem(ROW_LISTS, "_tool_dicts", "tools")
    with pytest.raises(UserError, match=r"GRPOTrainer\._tool_dicts .*'trl=="):
        make_trainer()


@pytest.mark.parametrize("values", [None, [{}]])
def test_a_list_of_rows_that_is_missing_or_of_another_length_is_refused(make_trainer, values):
    trainer = make_trainer()
    assert row_lists(trainer, 2) == []  # without tools or environments
    trainer.tools = [len]
    trainer._sync_tool_dicts = values
    with pytest.raises(UserError, match=r"GRPOTrainer\._sync_tool_dicts .*\b2 rows"):
        row_lists(trainer, 2)


@pytest.mark.parametrize("count", [7, 9])
def test_another_number_of_results_of_a_generation_is_refused(count):
    with pytest.raises(UserError, match=rf" {count} results, .* 8: prompt_ids, "):
        Generated.of(range(count))


def test_only_the_compatibility_module_names_what_is_not_public():
    folder = Path(compat.__file__).parent
    private = re.compile(r"(from|import) (trl\.|transformers\.trainer)")
    assert {path.name for path in folder.rglob("*.py") if private.search(path.read_text())} == {"compat.py"}


def test_names_of_our_own_are_free_in_trl(make_trainer):
    trl = make_trainer(GRPOTrainer, GRPOConfig)
    ours = set(vars(make_trainer())) - set(vars(trl))
    assert {
        *("_selections", "_dynamic"),
        *("_generations", "_update"),
        *("_rewards", "_stability", "_resume", "_tools"),
    } == ours
    inherited: set[str] = set()
    for layer in (PODSTrainer, Layer, *LAYERS):
        inherited |= {name for name in vars(layer) if hasattr(trl, name)} - overridden(layer)
    inherited -= set(vars(object))

    class Empty:
        """What Python gives every class; 3.13 gives more than 3.11."""

    assert inherited - set(vars(Empty)) - {"__annotations__", "_tag_names", "_name", "_paper"} == set()


# -- the constructor -----------------------------------------------------------------------------------------------


def test_the_constructor_takes_what_trl_s_takes():
    def shape(cls):
        return [(p.name, p.kind, p.default) for p in inspect.signature(cls.__init__).parameters.values()]

    assert shape(PODSTrainer) == shape(GRPOTrainer)
    annotations = PODSTrainer.__init__.__annotations__
    assert set(annotations) == {name for name, *_ in shape(PODSTrainer)} - {"self"} | {"return"}
    assert annotations["args"] == "PODSConfig | None"
