"""Rows in fixed slots: the tokens of the tree, a step that can be captured, and what is kept between generations."""

import logging
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.fx.experimental.proxy_tensor import make_fx

from pods_rl.prefix_tree import captured, decoding
from pods_rl.prefix_tree.captured import Slots
from pods_rl.prefix_tree.decoding import Path, RowDraws, generation_path

from .test_decoding import END, EQUAL, LONG, MIXED, V, batch, build, keys, once

UNSORTED = [MIXED[i] for i in (0, 3, 5, 1, 4, 6, 2)] * 3
READS = {"_local_scalar_dense", "nonzero", "item", "_unique2", "bincount", "masked_select", "equal", "is_nonzero"}


def complete(model, prompts, **settings):
    """Prompts and completions, which draw if the settings do."""
    defaults = {"eos_token_id": [END, 3, 22], "do_sample": True, "temperature": 1.0, "max_new_tokens": 40}
    inputs = batch(prompts, **defaults | settings)
    config = inputs["generation_config"]
    draws = RowDraws(keys(len(prompts)), config.max_new_tokens, strict=True) if config.do_sample else None
    return once(model, inputs, draws)


@pytest.fixture
def in_slots(monkeypatch):
    """Call it to complete rows in slots from then on, as on CUDA. Columns change their number soon."""
    monkeypatch.setattr(captured, "_COLUMNS", 8)
    return lambda: monkeypatch.setattr(decoding, "choose_path", lambda *how: Path.CAPTURED)


SETTINGS = {
    "drawn": (MIXED * 3, {}),
    "rows of a prompt apart": (UNSORTED, {}),
    "equal prompts": (EQUAL * 4, {"top_k": 12, "top_p": 0.9, "temperature": 1.4}),
    "probable tokens": (EQUAL * 4, {"min_p": 0.1, "temperature": 0.5}),
    "a common beginning": (LONG * 2, {"eos_token_id": None}),
    "prompts of two columns of graphs": ([[5, 6, 7] * 22] * 3 + [[8, 9]] * 2, {}),
    "greedy": (MIXED, {"do_sample": False}),
    "ends at once": (MIXED, {"eos_token_id": [*range(2, V)]}),
    "one token": (EQUAL, {"max_new_tokens": 1}),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_in_slots_get_the_tokens_of_the_tree(name, in_slots):
    prompts, settings = SETTINGS[name]
    model = build("qwen3")
    expected = complete(model, prompts, **settings)
    in_slots()
    assert torch.equal(complete(model, prompts, **settings), expected)
    assert generation_path(model) == Path.CAPTURED.value
    assert torch.equal(complete(model, prompts, **settings), expected)  # in the same buffers


@pytest.mark.parametrize(
    "settings", [{"top_k": 12, "top_p": 0.9}, pytest.param({"do_sample": False}, marks=pytest.mark.slow)], ids=str
)
def test_a_step_is_captured_once_and_replayed_without_a_read(monkeypatch, in_slots, settings):
    model = build("qwen3")
    expected = complete(model, MIXED * 3, **settings)
    in_slots()
    graphs = {}

    def replay(slots):
        if slots not in graphs:
            before = {name: value.clone() for name, value in vars(slots).items() if isinstance(value, torch.Tensor)}
            graphs[slots] = make_fx(lambda: slots.step())()
            for name, value in before.items():  # capturing on CUDA computes nothing
                getattr(slots, name).copy_(value)
        graphs[slots]()

    monkeypatch.setattr(Slots, "next_token", replay)
    for _ in range(2):
        assert torch.equal(complete(model, MIXED * 3, **settings), expected)
    nodes = [node for graph in graphs.values() for node in graph.graph.nodes if node.op == "call_function"]
    names = {node.target.__name__.partition(".")[0] for node in nodes}
    assert "index_copy_" in names
    assert not names & READS
    assert len(graphs) == len(captured._kept[model].slots)


def with_lora():
    policy = get_peft_model(build("qwen3"), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return policy.eval()


def trained(model):
    for name, weights in model.named_parameters():
        if "lora_B" in name or "k_proj" in name or "norm" in name or "embed" in name:
            weights.data.add_(torch.randn_like(weights), alpha=0.3)


@pytest.mark.parametrize("make", [lambda: build("qwen3"), lambda: with_lora().get_base_model()], ids=["full", "LoRA"])
def test_weights_that_changed_are_read_into_the_kept_addresses(make, in_slots):
    model = make()
    before = complete(model, UNSORTED)
    trained(model)
    assert not torch.equal(before, complete(model, UNSORTED))
    trained(model)
    expected = complete(model, UNSORTED)
    in_slots()
    complete(model, UNSORTED)
    kept = captured._kept[model]
    slots = dict(kept.slots)
    trained(model)
    later = complete(model, UNSORTED)
    assert captured._kept[model] is kept
    assert all(kept.slots.get(shape, buffers) is buffers for shape, buffers in slots.items())
    captured._kept.clear()
    assert torch.equal(complete(model, UNSORTED), later)
    assert not torch.equal(expected, later)


@pytest.mark.parametrize("how", ["an adapter", "another tensor", "a hook"])
def test_a_decoder_is_not_kept_for_a_model_that_changed(how, in_slots):
    model = build("qwen3")
    in_slots()
    complete(model, UNSORTED)
    kept = captured._kept[model]
    if how == "an adapter":
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    elif how == "another tensor":
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = torch.randn_like(weight)
    else:
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None)
    output = complete(model, UNSORTED)
    assert captured._kept.get(model) is not kept
    assert (generation_path(model) == Path.ROWS.value) == (how == "a hook")
    captured._kept.clear()
    assert torch.equal(complete(model, UNSORTED), output)


def test_what_would_fill_a_device_is_not_kept(in_slots, monkeypatch):
    """First the buffers go that the latest generation did not use."""
    model = build("qwen3")
    in_slots()
    complete(model, UNSORTED)
    used = set(captured._kept[model].slots)
    complete(model, UNSORTED, top_k=3)
    assert used < captured._kept[model].slots.keys()
    of_all = captured._kept[model].nbytes()
    monkeypatch.setattr(captured, "_memory_of", lambda device: (of_all - 1) / captured._KEPT_SHARE)
    complete(model, UNSORTED)
    assert {shape.processors for shape in captured._kept[model].slots} == {()}
    monkeypatch.setattr(captured, "_memory_of", lambda device: 10_000)
    complete(model, UNSORTED)
    assert model not in captured._kept


@pytest.fixture
def device(in_slots, monkeypatch):
    """Call it with a stand-in for a CUDA graph to complete rows as on a device; streams have stand-ins too."""
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def complete_by(graph):
        in_slots()
        monkeypatch.setattr(captured, "_can_capture", lambda device: True)
        monkeypatch.setattr(captured, "_memory_of", lambda device: float("inf"))
        monkeypatch.setattr(torch.cuda, "graph", graph.capture)
        for name, stand_in in (("Stream", lambda device: stream), ("current_stream", lambda device: stream),
                               ("stream", lambda stream: nullcontext()), ("CUDAGraph", graph)):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in)

    return complete_by


class Graph:
    """Stands in for a CUDA graph: the operations in place of their capture, which it leaves without an effect."""

    replays = 0

    def __init__(self) -> None:
        self._slots = sys._getframe(1).f_locals["self"]  # those that capture it

    @contextmanager
    def capture(self, *where, **how):
        buffers = [value for value in vars(self._slots).values() if isinstance(value, torch.Tensor)]
        buffers += [*self._slots._states]
        before = [buffer.clone() for buffer in buffers]
        yield
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def replay(self) -> None:
        Graph.replays += 1
        self._slots.step()

    def pool(self) -> None:
        return None


class WrongGraph(Graph):
    def replay(self) -> None:
        super().replay()
        latest = self._slots._latest
        self._slots.tokens[latest] = (self._slots.tokens[latest] + 1) % V


class NoGraph(Graph):
    def __init__(self) -> None:
        raise RuntimeError("no graph\non this device")


@pytest.mark.parametrize(("graph", "reason"), [(Graph, None), (WrongGraph, "100% of its"), (NoGraph, "no graph")])
def test_without_a_right_graph_the_same_steps_run_and_the_log_says_so_once(graph, reason, device, monkeypatch, caplog):
    monkeypatch.setattr(captured, "_logged", set())
    monkeypatch.setattr(Graph, "replays", 0)
    model = build("qwen3")
    expected = complete(model, UNSORTED)
    device(graph)
    with caplog.at_level(logging.WARNING, logger="pods_rl"):
        for _ in range(2):
            assert torch.equal(complete(model, UNSORTED), expected)
    reasons = [record.getMessage() for record in caplog.records if "graph was" in record.getMessage()]
    assert len(reasons) == (reason is not None)
    assert all(reason in text for text in reasons)
    assert (Graph.replays > 20) == (reason is None)


def test_draws_that_are_not_finite_raise(in_slots):
    model = build("qwen3")
    in_slots()
    complete(model, EQUAL)  # compares the decoder with the model, which without finite numbers would differ
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="probability"):
        complete(model, EQUAL)
    assert generation_path(model) == Path.CAPTURED.value


@pytest.mark.parametrize(
    ("shape", "settings"),
    [("mistral", {}), ("gpt2", {}), ("qwen3", {"repetition_penalty": 1.2})],
    ids=["a sliding window", "another arrangement", "a processor of prefixes"],
)
def test_what_slots_cannot_hold_is_left_to_nodes(shape, settings, monkeypatch):
    """Of a device that says it is CUDA."""
    model = build(shape)
    expected = complete(model, UNSORTED, **settings)
    kinds = []
    choose = decoding.choose_path
    on_cuda = SimpleNamespace(device=torch.device("cuda"), parameters=model.parameters)
    monkeypatch.setattr(decoding, "choose_path", lambda model, *how: kinds.append(choose(on_cuda, *how)) or kinds[-1])
    assert torch.equal(complete(model, UNSORTED, **settings), expected)
    assert kinds == [Path.ROWS if settings else Path.CAPTURED]
    assert generation_path(model) == Path.ROWS.value


def test_a_graph_is_not_shared_by_long_settings_that_differ_in_the_middle():
    tokens = torch.arange(2000)
    others = tokens.clone()
    others[1000] = 0
    assert captured._setting(("tokens", tokens)) == captured._setting(("tokens", tokens.clone()))
    assert captured._setting(("tokens", tokens)) != captured._setting(("tokens", others))
