"""Compute the prompts that rows share once, in TRL's log-probability pass, and only rows with a gradient.

A pack holds each distinct prompt once, followed by its rows: `prompt[:-1]`, then for every row `prompt[-1:]` and
`completion[:-1]`. Every token keeps the position that it has in the batch of rows. The copy of the prompt's last token
predicts the row's first token, so the labels are the completion itself. A row's tokens attend to its prompt and,
causally, to themselves. The idea is published as Prefix Grouper (arXiv 2506.05433).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from ...prefix_tree.cache import rope_types

LogProbs = tuple[Tensor, Tensor | None, Tensor | None]  # TRL's result: log-probabilities, entropies, auxiliary loss

ATTEND = "packed_attention"  # the keyword that transformers passes on to the attention function
# A pack is used if its cost is at most PAYS times that of the rows. The cost is the number of tokens plus CALL for each
# call of the attention. Measured on one CPU thread with the tiny policy. A larger model gains earlier.
PAYS, CALL = 0.95, 12
# Keywords of attention functions that change nothing in a pass without a cache, whatever their value.
HARMLESS = {"attention_mask", "position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values"}
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
class SharedPrompt:
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
    groups: list[SharedPrompt]
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
        groups.append(SharedPrompt(begin, prompt, _buckets(lengths, begin + prompt, device)))
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
            # Heads that share keys become more queries of them: [rows, K, repeats * width, D].
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


# -- the stand-in for the model --------------------------------------------------------------------------------------


@dataclass
class Scores:
    """What TRL reads of a model's output: `[B, logits_to_keep]` each."""

    log_probs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class ChosenRows:
    """Stand in for the model of TRL's `_get_per_token_logps_and_entropies`, which calls it once per batch.

    The model is called exactly once in each call, so that processes that share its weights stay in step.

    Args:
        model: a causal language model with TRL's fused head, wrapped or not.
        logits_to_keep: columns of the completion.
        merge: compute equal rows once.
        packed: compute each prompt once.
        live: `[B]`, the rows whose results are read; None: all.
        unread: `[B, T]` log-probabilities to return for the others; None: 0.
        counts: its `merged` grows by the rows for which an equal one was computed.
    """

    model: Callable[..., Any]
    logits_to_keep: int
    merge: bool
    packed: bool
    live: Tensor | None = None
    unread: Tensor | None = None
    counts: dict[str, int] | None = None

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **how: Any) -> Scores:
        """Return the scores of `[B, T]` rows; 0 without a gradient on padding and for rows that are not read."""
        keep = self.logits_to_keep
        rows = Rows.of(input_ids, attention_mask, keep)
        chosen, owner = self._choose(rows)
        pack = lay_out(rows, chosen, input_ids.device) if self.packed and rows.regular else None
        if pack is not None and pack.cost(CALL) <= PAYS * len(chosen) * input_ids.size(1):
            output = call_packed(self.model, pack, **how)
            starts = pack.starts
        else:
            output, starts = self._call_rows(input_ids, attention_mask, labels, chosen, **how)
        return self._scattered(output, rows, owner, starts)

    def _choose(self, rows: Rows) -> tuple[list[int], list[int | None]]:
        """Return the rows to compute, one at least, and for each row the one that computes it."""
        live = [True] * len(rows.tokens) if self.live is None else self.live.tolist()
        first: dict[Any, int] = {}
        owner: list[int | None] = []
        for row, reads in enumerate(live):
            if not reads or not rows.completions[row]:
                owner.append(None)
            else:
                owner.append(first.setdefault(rows.tokens[row].tobytes() if self.merge else row, row))
        chosen = list(first.values())
        if self.counts is not None:
            self.counts["merged"] += len(owner) - owner.count(None) - len(chosen)
        return chosen or [int((rows.prompts + rows.completions).argmin())], owner

    def _call_rows(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, chosen: list[int], **how: Any
    ) -> tuple[Any, dict[int, int]]:
        """Call the model on rows; return its output flattened, and where each row's completion starts in it."""
        index = torch.tensor(chosen, device=input_ids.device)
        ids, mask, labels = (x.index_select(0, index) for x in (input_ids, attention_mask, labels))
        output = self.model(input_ids=ids, attention_mask=mask, labels=labels, **how)
        step = input_ids.size(1) - 1  # the head shifts the labels by one
        return output, {row: (i + 1) * step - self.logits_to_keep for i, row in enumerate(chosen)}

    def _scattered(self, output: Any, rows: Rows, owner: list[int | None], starts: Mapping[int, int]) -> Scores:
        """Gather the scores of each row; one computed row serves all that equal it, and receives their gradients."""
        keep, device = self.logits_to_keep, output.log_probs.device
        start = torch.tensor([-1 if own is None else starts[own] for own in owner])
        read = torch.from_numpy(rows.tokens[:, rows.prompt_width :] >= 0) & (start >= 0).unsqueeze(1)
        index = (
            (start.unsqueeze(1) + torch.arange(keep)).masked_fill(~read, output.log_probs.numel()).flatten().to(device)
        )

        def back(values: Tensor) -> Tensor:
            return pad(values.flatten(), (0, 1)).index_select(0, index).view(-1, keep)

        log_probs = back(output.log_probs)
        if self.unread is not None and self.live is not None:
            log_probs = torch.where(self.live.unsqueeze(1), log_probs, self.unread[:, :keep].to(log_probs.dtype))
        return Scores(log_probs, None if output.entropy is None else back(output.entropy))


def call_packed(model: Callable[..., Any], pack: Pack, **how: Any) -> Any:
    """Call a model on a pack. A mask of four dimensions keeps transformers from building one of its own."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=pack.input_ids.device)
    return model(
        input_ids=pack.input_ids, position_ids=pack.position_ids, shift_labels=pack.labels, attention_mask=mask,
        **how, **{ATTEND: partial(attend, pack)},
    )  # fmt: skip


# -- attention functions of transformers -----------------------------------------------------------------------------


def teach_attention_packs() -> None:
    """Wrap transformers' attention functions once, so that each takes a pack; without one it is called unchanged.

    The wrappers stay until the process ends: gradient checkpointing calls them again in the backward pass.
    """
    for name, function in list(AttentionInterface().items()):
        if "paged" not in name and not hasattr(function, "takes_packs"):
            AttentionInterface.register(name, _taking_packs(function))


def _taking_packs(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **how: Any) -> Any:
        packed = how.pop(ATTEND, None)
        if packed is None:
            return function(module, query, key, value, *args, **how)
        if how.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
            raise UnsupportedAttentionError("its attention is not causal")
        known = {"scale": how.pop("scaling", None), "window": how.pop("sliding_window", None) or 0}
        for name, given in how.items():
            if name not in HARMLESS and not (given is None or (isinstance(given, int | float) and not given)):
                raise UnsupportedAttentionError(f"its attention takes {name}")
        return packed(query, key, value, **known), None

    attention.takes_packs = True  # type: ignore[attr-defined]
    return attention


# -- models that can take packs --------------------------------------------------------------------------------------


def draws_noise(model: Any) -> bool:
    """Return whether a model in training draws random numbers: equal rows then differ."""
    config = model.config.get_text_config().to_dict()
    named = any(value for name, value in config.items() if name == "attention_dropout" or "jitter" in name)
    dropout = any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in model.modules())
    return dropout or (named and model.training)


def why_rows(model: Any, call: Callable[..., Any], *, tolerance: float = 1e-3) -> str | None:
    """Return why a model must compute rows one by one, None if it takes packs.

    Runs two small passes. Call this on every process that shares the weights.

    Args:
        model: the bare model, with or without adapters.
        call: the model as it is trained: wrapped by what shares its weights.
        tolerance: how far the log-probabilities of a pack may be from those of its rows, as a share of their spread
            over tokens: by rounding 1e-6 in float32 and up to 0.05 in 16 bits; by wrong positions at least 0.3.
    """
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        return "its adapter adds tokens to the prompt"
    if rope_types(config) & {"dynamic", "longrope"}:
        return "its rotary frequencies depend on the length of the batch"
    if other:
        return f"it has layers of {', '.join(sorted(other))}"
    if draws_noise(model):
        return "it has dropout or other noise"
    if getattr(config, "output_router_logits", False):
        return "its loss reads the router of its experts"
    return _disagreement(call, next(model.parameters()).device, config, tolerance)


def _disagreement(call: Callable[..., Any], device: torch.device, config: Any, tolerance: float) -> str | None:
    """Compare a small pack with its rows, without a gradient; return what is wrong, None if they agree."""
    teach_attention_packs()
    prompts, completions = torch.tensor([[5], [5], [2], [2]]), torch.tensor([[4], [2], [1], [4]])
    place = torch.arange(9)
    mask = ((place >= 5 - prompts) & (place < 5 + completions)).long().to(device)
    ids = (torch.arange(36).view(4, 9) * 7 + 3) % min(config.vocab_size, 97)
    ids[1, :5], ids[3, :5] = ids[0, :5], ids[2, :5]
    ids = ids.to(device)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-4] = -100
    pack = lay_out(Rows.of(ids, mask, 4), range(4), device)
    rows = ChosenRows(call, 4, merge=False, packed=False)
    with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradient checkpointing without a gradient
        expected = rows(ids, mask, labels, fused_lm_head=True)
        try:
            output = call_packed(call, pack, fused_lm_head=True)
        except UnsupportedAttentionError as error:
            return str(error)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            return f"a pass over a pack failed: {type(error).__name__}: {error}"
        got = rows._scattered(output, Rows.of(ids, mask, 4), [0, 1, 2, 3], pack.starts)
    if not pack.windows:
        return f"its attention ({config._attn_implementation}) takes no packs"
    kinds = getattr(config, "layer_types", None) or ()
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None))
    if windowed and pack.windows == {0}:
        return "its attention does not state its sliding window"
    real = labels[:, -4:] >= 0
    one, other = got.log_probs[real].float(), expected.log_probs[real].float()
    apart = ((one - other).norm() / (other - other.mean()).norm()).item()
    return None if apart <= tolerance else f"its log-probabilities differ in a pack, by {apart:.1g} of their spread"
