"""Stand in for the model in TRL's log-probability pass: only rows with a gradient, equal rows and prompts once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from ...rollouts.decoding import rope_types
from .prefix import Pack, Rows, UnsupportedAttentionError, attend, lay_out

LogProbs = tuple[Tensor, Tensor | None, Tensor | None]  # TRL's result: log-probabilities, entropies, auxiliary loss

ATTEND = "packed_attention"  # the keyword that transformers passes on to the attention function
# A pack is used where it costs at most this share of the rows: their tokens, and for each call of the attention as
# much as so many tokens. Measured on one CPU thread with the tiny policy; a larger model gains earlier.
PAYS, CALL = 0.95, 12
# Keywords of attention functions that change nothing in a pass without a cache, whatever their value.
HARMLESS = {"attention_mask", "position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values"}


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
