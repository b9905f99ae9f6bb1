"""The attention of trees on a GPU: the choice by torch's version, and its numbers. It runs on a stand-in (gpu.py)."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pods_rl.prefix_tree import attention, blocks
from pods_rl.prefix_tree.attention import Scoring, Special, TreeAttention, choose_kernel
from pods_rl.prefix_tree.packing import probe_trees
from pods_rl.prefix_tree.tree import prefix_tree

from .gpu import CALLS, TORCHES, put_gpu
from .test_packing import batch, rows_of
from .test_packing import build as build_small

ARGUMENTS = {version: frozenset(inspect.signature(call).parameters) for version, call in CALLS.items()}
ARGUMENTS["2.9"] = frozenset()


# -- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"device": "cpu"}, "CPU"),
        ({"device": "xpu"}, "xpu"),
        ({"dtype": torch.float32}, "float32"),
        ({"capability": (7, 5)}, "7.5"),
        ({"head_size": 320, "value_size": 320}, "320"),
        ({"head_size": 20, "value_size": 20}, "20"),
        ({"head_size": 192}, "192"),
        ({"head_size": 224, "value_size": 224, "capability": (8, 9)}, "224"),
        ({"arguments": frozenset()}, "torch.nn.attention.varlen"),
        ({"arguments": ARGUMENTS["2.10"], "special": Special(window=True)}, "window_size"),
        ({"special": Special(softcap=True)}, "bound"),
        ({"special": Special(dropout=True)}, "dropout"),
        ({"arguments": ARGUMENTS["2.13"] - {"return_aux"}, "special": Special(sinks=True)}, "sinks"),
        ({"arguments": frozenset({"query"})}, "window_size"),
    ],
)
def test_where_the_call_does_not_fit_blocks_are_computed_and_the_reason_is_said(changed, word):
    fits = {
        "arguments": ARGUMENTS["2.13"], "device": "cuda", "dtype": torch.bfloat16, "capability": (9, 0),
        "head_size": 128, "value_size": 128,
    }  # fmt: skip
    assert choose_kernel(**fits).why_blocks is None
    kernel = choose_kernel(**fits | changed)
    assert word in kernel.why_blocks
    assert word in str(kernel)
    assert kernel.repeats_heads == (changed.get("device") != "cpu")


@pytest.mark.parametrize("window", [0, 3])
def test_the_installed_torch_takes_the_call(window):
    """On tensors without values, which pass torch's own checks of the arguments, forward and backward."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert attention.varlen_arguments() == set(inspect.signature(varlen.varlen_attn).parameters)
    tree = prefix_tree(rows_of(*batch([4, 4], [5, 3])[:2]), 5)
    length = len(tree.tokens)
    query = torch.empty(length, 4, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key, value = (torch.empty(length, 2, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "kv")
    of_tree = TreeAttention(tree.branches, torch.device("meta"))
    out = of_tree.by_variable_length(query, key, value, None, Scoring(0.3, window))
    assert out.shape == query.shape
    out.sum().backward()
    assert (query.grad.shape, key.grad.shape, value.grad.shape) == (query.shape, key.shape, value.shape)


class IndexAdds(TorchDispatchMode):
    """Records the data types in which several gradients are added up for one node."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "index_add" in str(function):
            sums, _, nodes, _ = args
            if len(nodes.unique()) < len(nodes):
                self.dtypes.append(sums.dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("version", TORCHES)
def test_gradients_of_a_node_on_many_paths_are_added_up_in_float32(monkeypatch, version):
    """A GPU rounds every sum of bfloat16; a CPU does not, so only the data type shows it here."""
    put_gpu(monkeypatch, version)
    monkeypatch.setattr(blocks, "DENSE", 0)
    ids, mask, _, keep = batch([4] * 8, [5] * 8, tokens=2)
    tree = prefix_tree(rows_of(ids, mask), ids.size(1) - keep)
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, len(tree.tokens), 16, generator=draw).bfloat16()
    states = [torch.randn(1, 2, len(tree.tokens), 16, generator=draw).bfloat16().requires_grad_() for _ in "kv"]
    out = TreeAttention(tree.branches, ids.device)(query, *states, None)
    with IndexAdds() as adds:
        gradients = torch.autograd.grad(out.float().sum(), states)
    assert adds.dtypes
    assert set(adds.dtypes) == {torch.float32}
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)


# -- its numbers ---------------------------------------------------------------------------------------------------


def build(dtype, **config):
    return build_small("qwen2", {"head_dim": 8} | config).to(dtype)


@pytest.mark.parametrize("error", [RuntimeError("not compiled with FlashAttention"), TypeError("q"), AssertionError()])
def test_a_call_that_fails_in_the_probe_is_replaced_by_blocks(monkeypatch, error):
    def failing(query, key, value, *args, scale, window_size, enable_gqa):
        raise error

    put_gpu(monkeypatch, "2.13", call=failing)
    model = build(torch.bfloat16)
    probe = probe_trees(model, model, tolerance=0.1)
    assert probe.why_rows is None
    assert "device" in str(probe)


def test_a_model_that_computes_no_trees_does_not_blame_the_call(monkeypatch):
    put_gpu(monkeypatch, "2.13")
    model = build(torch.bfloat16)
    model.model.layers[0].register_forward_hook(lambda module, given, out: out + out.roll(1, dims=1))
    assert "log-probabilities" in probe_trees(model, model, tolerance=0.1).why_rows
    assert attention.failing == set()
