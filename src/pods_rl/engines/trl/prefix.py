"""Rows that share prompts as one sequence without padding, and the attention over it.

A pack holds each distinct prompt once, followed by its rows: `prompt[:-1]`, then for every row `prompt[-1:]` and
`completion[:-1]`. Every token keeps the position that it has in the batch of rows. The copy of the prompt's last token
predicts the row's first token, so the labels are the completion itself. A row's tokens attend to its prompt and,
causally, to themselves. The idea is published as Prefix Grouper (arXiv 2506.05433).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

IGNORED = -100  # the label of a token that is not scored
SPREAD = 2  # rows of one attention call differ in length by at most this factor


class UnsupportedAttentionError(Exception):
    """The model's attention takes an argument that packs do not implement."""


@dataclass(frozen=True)
class Rows:
    """A batch as TRL lays it out, on the CPU: prompts padded on the left, completions on the right.

    Args:
        tokens: `[B, T]`, -1 on padding.
        prompt_width: columns of the prompt.
        prompts: tokens of each row's prompt, `[B]`.
        completions: tokens of each row's completion, `[B]`.
        regular: whether every row has a prompt, and no hole between its tokens.
    """

    tokens: NDArray[np.int64]
    prompt_width: int
    prompts: NDArray[np.int64]
    completions: NDArray[np.int64]
    regular: bool

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> Rows:
        """Copy a batch `[B, T]` to the CPU; its last `logits_to_keep` columns are the completions'."""
        tokens = input_ids.masked_fill(attention_mask == 0, -1).cpu().numpy()
        width = tokens.shape[1] - logits_to_keep
        real = tokens >= 0
        prompts, completions = real[:, :width].sum(1), real[:, width:].sum(1)
        left = np.arange(width) >= width - prompts[:, None]
        right = np.arange(logits_to_keep) < completions[:, None]
        whole = (real[:, :width] == left).all() and (real[:, width:] == right).all()
        return cls(tokens, width, prompts, completions, bool(whole and prompts.all()))

    def prompt(self, row: int) -> bytes:
        """Return a row's prompt as a key: equal for rows with the same prompt."""
        return self.tokens[row, : self.prompt_width].tobytes()


@dataclass(frozen=True)
class Bucket:
    """Rows of one prompt that one attention call computes: `count` of them, padded to `width` tokens.

    Args:
        start, stop: their tokens in the pack.
        gather: `[count * width]`, the token of each padded place, from `start`; None if the rows are equally long.
        real: `[stop - start]`, the padded place of each token; None if the rows are equally long.
    """

    start: int
    stop: int
    count: int
    width: int
    gather: Tensor | None
    real: Tensor | None


@dataclass(frozen=True)
class Group:
    """A prompt without its last token, from `start`, and its rows."""

    start: int
    prompt: int
    buckets: list[Bucket]


@dataclass(frozen=True)
class Pack:
    """The layout of one packed sequence of L tokens.

    Args:
        input_ids, position_ids, labels: `[1, L]`; labels are shifted already.
        groups: the prompts with their rows, in the order of the sequence.
        starts: by row of the batch, where its tokens begin.
        windows: filled by the attention: the sliding windows that the layers asked for, 0 for none.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    groups: list[Group]
    starts: dict[int, int]
    windows: set[int] = field(default_factory=set)
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def cost(self, call: int) -> int:
        """Return the tokens, and `call` more for each call of the attention."""
        calls = sum((group.prompt > 0) + len(group.buckets) for group in self.groups)
        return self.input_ids.numel() + call * calls

    def mask(self, keys: int, width: int, repeats: int, window: int) -> Tensor:
        """Return which of `keys` each of the last `width` tokens sees, `[repeats * width, keys]`; made once."""
        name = (keys, width, repeats, window)
        if name not in self._masks:
            key = torch.arange(keys, device=self.input_ids.device)
            query = key[keys - width :].unsqueeze(1)
            seen = key <= query
            if window:
                seen &= key > query - window
            self._masks[name] = seen.repeat(repeats, 1)
        return self._masks[name]


def lay_out(rows: Rows, chosen: Sequence[int], device: torch.device) -> Pack:
    """Lay the chosen rows of a regular batch out as one pack; rows of one prompt stand together, longest first.

    Example:
        >>> ids = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 9, 0]])
        >>> pack = lay_out(Rows.of(ids, ids != 0, 2), [0, 1], ids.device)
        >>> pack.input_ids.tolist(), pack.position_ids.tolist(), pack.labels.tolist()
        ([[5, 6, 7, 6]], [[1, 2, 3, 2]], [[-100, 7, 8, 9]])
    """
    width, tokens = rows.prompt_width, rows.tokens
    members: dict[bytes, list[int]] = {}
    for row in chosen:
        members.setdefault(rows.prompt(row), []).append(row)
    ids: list[Any] = []
    positions: list[Any] = []
    labels: list[Any] = []
    groups, starts, at = [], {}, 0
    for group in members.values():
        prompt = int(rows.prompts[group[0]]) - 1
        ids.append(tokens[group[0], width - 1 - prompt : width - 1])
        positions.append(np.arange(width - 1 - prompt, width - 1))
        labels.append(np.full(prompt, IGNORED))
        begin, at = at, at + prompt
        group = sorted(group, key=lambda row: -int(rows.completions[row]))
        lengths = []
        for row in group:
            length = max(int(rows.completions[row]), 1)  # a masked row still has its prompt's last token
            ids.append(tokens[row, width - 1 : width - 1 + length])
            positions.append(np.arange(width - 1, width - 1 + length))
            label = tokens[row, width : width + length]
            labels.append(np.where(label < 0, IGNORED, label))
            starts[row] = at
            at += length
            lengths.append(length)
        groups.append(Group(begin, prompt, _buckets(lengths, begin + prompt, device)))
    input_ids, position_ids, shifted = (
        torch.from_numpy(np.concatenate(parts)).unsqueeze(0).to(device) for parts in (ids, positions, labels)
    )
    return Pack(input_ids, position_ids, shifted, groups, starts)


def _buckets(lengths: Sequence[int], start: int, device: torch.device) -> list[Bucket]:
    """Split descending lengths into runs that differ by at most the factor `SPREAD`."""
    buckets = []
    while lengths:
        width = lengths[0]
        count = sum(length * SPREAD >= width for length in lengths)
        here, lengths = np.array(lengths[:count]), lengths[count:]
        stop = start + int(here.sum())
        gather = real = None
        if here.min() < width:
            first = here.cumsum() - here
            place = np.arange(width)
            padded = first[:, None] + np.minimum(place, here[:, None] - 1)
            gather = torch.from_numpy(padded.ravel()).to(device)
            real = torch.from_numpy(np.flatnonzero(place < here[:, None])).to(device)
        buckets.append(Bucket(start, stop, count, width, gather, real))
        start = stop
    return buckets


def attend(pack: Pack, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int = 0) -> Tensor:
    """Return the attention of a pack, `[1, L, H, D]`: prompts to themselves, each row to its prompt and itself.

    Args:
        query: `[1, H, L, D]`.
        key, value: `[1, K, L, D]`, where K divides H.
        scale: of the products; None: one over the root of D.
        window: how many tokens back a token sees, itself included; 0: all.
    """
    pack.windows.add(window)
    q, k, v = query[0], key[0], value[0]
    repeats = q.size(0) // k.size(0)
    pieces = []
    for group in pack.groups:
        prompt = slice(group.start, group.start + group.prompt)
        if group.prompt:
            keys, values = (x[:, prompt].repeat_interleave(repeats, 0).unsqueeze(0) for x in (k, v))
            cut = pack.mask(group.prompt, group.prompt, 1, window) if 0 < window < group.prompt else None
            out = scaled_dot_product_attention(
                q[:, prompt].unsqueeze(0), keys, values, attn_mask=cut, is_causal=cut is None, scale=scale
            )
            pieces.append(out[0].transpose(0, 1))
        for bucket in group.buckets:
            mask = pack.mask(group.prompt + bucket.width, bucket.width, repeats, window)
            keys, values = (torch.cat([_shared(x[:, prompt], bucket), _rows(x, bucket)], dim=2) for x in (k, v))
            # Heads that share keys become further queries of them: [rows, K, repeats * width, D].
            queries = _rows(q, bucket).reshape(bucket.count, k.size(0), -1, q.size(2))
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            out = out.reshape(bucket.count, q.size(0), bucket.width, v.size(2)).transpose(1, 2).flatten(0, 1)
            pieces.append(out if bucket.real is None else out.index_select(0, bucket.real))
    return torch.cat(pieces).unsqueeze(0)


def _shared(prompt: Tensor, bucket: Bucket) -> Tensor:
    return prompt.expand(bucket.count, -1, -1, -1)


def _rows(tokens: Tensor, bucket: Bucket) -> Tensor:
    """Cut the rows of a bucket from `[heads, L, D]`; return `[count, heads, width, D]`."""
    own = tokens[:, bucket.start : bucket.stop]
    if bucket.gather is not None:
        own = own.index_select(1, bucket.gather)
    return own.unflatten(1, (bucket.count, bucket.width)).transpose(0, 1)
