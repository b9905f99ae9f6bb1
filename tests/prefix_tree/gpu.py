"""A stand-in for a GPU on a CPU: the choices of a GPU, and torch's variable-length call, written as documented.

The tensors stay on the CPU. What the project chooses for a GPU, and how it calls torch there, runs as it would on one.
No kernel of a GPU runs.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pods_rl.prefix_tree import attention

TORCHES = ("2.9", "2.10", "2.11", "2.13")  # versions of torch between which its variable-length call changed
Window = tuple[int, int]


def reference(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, most_queries: int, most_keys: int,
    scale: float | None, window: Window, grouped: bool, auxiliary: Any = None,
) -> Any:  # fmt: skip
    """Compute `varlen_attn` in float32, with the checks that torch and FlashAttention make.

    If requested, also the logarithms of the sums of weights, `[H, L]`, which have no gradient in torch either.
    """
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert queries.dtype == keys.dtype == torch.int32
    assert all(x.is_contiguous() for x in (query, key, value, queries, keys))
    assert (int(queries.diff().max()), int(keys.diff().max())) == (most_queries, most_keys)
    assert (int(queries[-1]), int(keys[-1])) == (len(query), len(key))
    assert grouped or query.size(1) == key.size(1), "the same number of heads"
    left, right = window
    assert right == 0, "causal"
    shared_by = query.size(1) // key.size(1)
    sequences = []
    log_sums = []
    for (first_query, last_query), (first_key, last_key) in zip(
        pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True
    ):
        q = query[first_query:last_query].float().transpose(0, 1)
        k = key[first_key:last_key].float().transpose(0, 1).repeat_interleave(shared_by, 0)
        v = value[first_key:last_key].float().transpose(0, 1).repeat_interleave(shared_by, 0)
        # the last query stands where the last key stands
        place_of_query = torch.arange(k.size(1) - q.size(1), k.size(1)).unsqueeze(1)
        back = place_of_query - torch.arange(k.size(1))
        hidden = back < 0
        if left >= 0:
            hidden |= back > left
        scores = q @ k.transpose(1, 2) * (q.size(2) ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(hidden, -torch.inf)
        log_sums.append(scores.detach().logsumexp(-1))
        sequences.append((scores.softmax(-1) @ v).transpose(0, 1))
    outputs = torch.cat(sequences).to(query.dtype)
    if auxiliary is not None and auxiliary.lse:
        return outputs, torch.cat(log_sums, 1)
    return outputs


class AuxRequest(NamedTuple):
    lse: bool = False


def varlen_of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, None, (-1, 0), False, return_aux)


def varlen_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, False, return_aux)


def varlen_of_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa, return_aux)


CALLS: dict[str, Callable[..., Any]] = {"2.10": varlen_of_2_10, "2.11": varlen_of_2_11, "2.13": varlen_of_2_13}


def put_gpu(monkeypatch: pytest.MonkeyPatch, version: str, call: Any = None) -> None:
    """Let the attention of trees choose as on a GPU of compute capability 9.0, with this version of torch.

    Args:
        monkeypatch: undoes it.
        version: of `TORCHES`.
        call: torch's variable-length call. If None, the reference with the arguments of that version.
    """
    module = None
    if version in CALLS:
        module = ModuleType("torch.nn.attention.varlen")
        module.varlen_attn = call or CALLS[version]
        module.AuxRequest = AuxRequest
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)  # None: the import raises
    monkeypatch.setattr(attention, "hardware", lambda device: ("cuda", (9, 0)))
    monkeypatch.setattr("pods_rl.prefix_tree.packing.hardware", lambda device: ("cuda", (9, 0)))
    monkeypatch.setattr(attention, "failing", set())
