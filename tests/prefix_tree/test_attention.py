"""Attention that is not plain, over trees: by a dense mask in float64. Models: tests/engines/test_families.py."""

import numpy as np
import pytest
import torch

from pods_rl.prefix_tree import attention, blocks
from pods_rl.prefix_tree.attention import TreeAttention
from pods_rl.prefix_tree.tree import prefix_tree
from tests.numeric import FLOAT64, assert_near

from .gpu import put_gpu

BFLOAT16 = 0.02  # about three roundings of bfloat16, whose steps are 2**-8
HEADS = 4


def random_tree(seed):
    """Three prompts, the second of one row; rows share up to all of another row."""
    draw = np.random.default_rng(seed)
    rows = []
    for prompt_length, count in ((6, 6), (3, 1), (6, 4)):
        prompt = draw.integers(3, 9, prompt_length)
        before = [draw.integers(3, 9, 20)]
        for _ in range(count):
            completion = draw.integers(3, 9, draw.integers(1, 21))
            like = before[draw.integers(len(before))]
            shared = draw.integers(0, min(len(like), len(completion)) + 1)
            completion[:shared] = like[:shared]
            before.append(completion)
            row = np.full(26, -1)
            row[6 - prompt_length : 6] = prompt
            row[6 : 6 + len(completion)] = completion
            rows.append(row)
    return prefix_tree(np.array(rows), 6)


def states_of(tree, sharing, value_size, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    length = len(tree.tokens)
    shapes = ((HEADS, length, 8), (HEADS // sharing, length, 8), (HEADS // sharing, length, value_size), (HEADS,))
    made = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    return [made[0][None], made[1][None], made[2][None], made[3]]


def dense(tree, states, window=0, softcap=0.0, sinks=False):
    """Attention under the mask of all pairs of nodes, with the sink as one more column."""
    query, key, value, scores_of_sinks = states
    length = query.size(2)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for nodes in tree.nodes:
        path = nodes[nodes >= 0]
        for end, node in enumerate(path):
            start = max(0, end + 1 - window) if window else 0
            seen[node, path[start : end + 1]] = True
    key, value = (x.repeat_interleave(HEADS // x.size(1), 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * 0.7
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks:
        scores = torch.cat([scores, scores_of_sinks.view(1, -1, 1, 1).expand(-1, -1, length, 1)], 3)
    return (scores.softmax(3)[..., :length] @ value).transpose(1, 2)


def values_and_gradients(attend, states):
    states = [x.detach().requires_grad_() for x in states]
    out = attend(states)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad(out, states, upstream.to(out.dtype), allow_unused=True)
    named = zip(("query", "key", "value", "sinks"), found, strict=True)
    return {"out": out.detach()} | {name: x for name, x in named if x is not None}


RULES = {
    "full": {},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "sinks and a window": {"sinks": True, "window": 3},
    "sinks, a softcap and a window": {"sinks": True, "softcap": 1.5, "window": 5},
}
LAYOUTS = {"one mask": (512, 256, 32), "a trunk": (0, 256, 32), "parts": (0, 4, 2), "long rows": (0, 4, 10**6)}


def take_layout(monkeypatch, name):
    for constant, value in zip(("DENSE", "LONG", "SHARED"), LAYOUTS[name], strict=True):
        monkeypatch.setattr(blocks, constant, value)


def by_tree(tree, rule):
    def attend(states):
        options = rule | {"sinks": states[3] if rule.get("sinks") else None}
        return TreeAttention(tree.branches, torch.device("cpu"))(*states[:3], 0.7, **options)

    return attend


@pytest.mark.numeric
@pytest.mark.parametrize(("sharing", "value_size"), [(1, 8), (2, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients_are_those_of_a_dense_mask(monkeypatch, rule, layout, sharing, value_size):
    take_layout(monkeypatch, layout)
    monkeypatch.setattr(attention, "DENSE", 0 if layout == "long rows" else 512)
    monkeypatch.setattr(attention, "FEW", 0 if layout == "parts" else 128)
    for seed in range(2):
        tree = random_tree(seed)
        if layout == "parts":  # what long rows share is computed apart from them
            assert blocks.lay_out(tree.branches, len(tree.tokens), torch.device("cpu"), spans=True).spans
        states = states_of(tree, sharing, value_size)
        expected = values_and_gradients(lambda x, tree=tree: dense(tree, x, **RULES[rule]), states)
        assert_near(values_and_gradients(by_tree(tree, RULES[rule]), states), expected, FLOAT64)


def test_parts_are_joined_in_float32(monkeypatch):
    """The distance to float64 is that of one call for each row."""
    tree = random_tree(0)
    states = states_of(tree, 2, 8, torch.bfloat16)
    exact = values_and_gradients(lambda x: dense(tree, x), [x.double() for x in states])

    def distance(layout):
        take_layout(monkeypatch, layout)
        found = values_and_gradients(by_tree(tree, {}), states)
        return torch.stack([(x.double() - exact[name]).norm() / exact[name].norm() for name, x in found.items()])

    in_parts = distance("parts")
    assert (in_parts < 1.5 * distance("a trunk")).all()
    assert (in_parts < BFLOAT16).all()


@pytest.mark.parametrize(("sinks", "softcap"), [(False, 0.0), (True, 0.0), (False, 1.5)])
def test_dropout_drops_weights_and_keeps_their_mean(sinks, softcap):
    tree = random_tree(1)
    states = states_of(tree, 2, 8)
    rule = {"softcap": softcap, "sinks": sinks}
    expected = dense(tree, states, **rule)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = torch.stack([by_tree(tree, rule | {"dropout": 0.2})(states) for _ in range(400)])
    assert draws.std(0).max() > 0
    error = (draws.mean(0) - expected) / (draws.std(0) / 20).clamp(min=1e-9)
    assert error.abs().mean() < 1  # of a normal distribution 0.8


# -- torch's call on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"sinks": True, "window": 3}])
@pytest.mark.parametrize(("version", "sharing"), [("2.9", 2), ("2.10", 1), ("2.11", 2), ("2.13", 4)])
def test_values_and_gradients_by_the_call_of_a_gpu(monkeypatch, version, sharing, rule):
    """The call returns sums without a gradient, so that of the sink's share is computed."""
    put_gpu(monkeypatch, version)
    tree = random_tree(2)
    states = states_of(tree, sharing, 8, torch.bfloat16)
    expected = values_and_gradients(lambda x: dense(tree, x, **rule), [x.double() for x in states])
    found = values_and_gradients(by_tree(tree, rule), states)
    assert_near({name: x.double() for name, x in found.items()}, expected, BFLOAT16)
    attend = TreeAttention(tree.branches, torch.device("cpu"))
    attend(*states[:3], 0.7, rule.get("window", 0), sinks=states[3] if "sinks" in rule else None)
    by_call = version != "2.9" and not (version == "2.10" and "window" in rule)
    assert all((kernel.why_blocks is None) == by_call for kernel in attend.kernels.values())
