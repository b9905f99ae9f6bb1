"""TRL's pass for log-probabilities over a prefix tree: each distinct prefix of the rows once, and nothing else.

The nodes of the tree are one sequence without padding. Every token keeps the position that it has in the batch of rows,
so the scores are those of the rows up to rounding.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .attention import (
    KEYWORD,
    TreeAttention,
    UnsupportedAttentionError,
    avoid_variable_length,
    hardware,
    teach_attention_trees,
)
from .cache import rope_types
from .tree import prefix_tree

IGNORED = -100  # the label of a token that is not scored


@dataclass(frozen=True)
class TreePass:
    """Stand in for the model of TRL's `_get_per_token_logps_and_entropies`, which calls it once per batch.

    The model is called exactly once in each call, so that processes that share its weights stay in step.

    Args:
        model: a causal language model with TRL's fused head, wrapped or not.
        logits_to_keep: columns of the completion.
        tree: whether the model computes trees; else the rows that are read are computed as rows.
        live: `[B]`, the rows whose results are read; None: all.
        unread: `[B, T]` log-probabilities to return for the others; None: 0.
        tokens: grows by the tokens of each pass, as `computed`.
    """

    model: nn.Module
    logits_to_keep: int
    tree: bool
    live: Tensor | None = None
    unread: Tensor | None = None
    tokens: Counter[str] = field(default_factory=Counter)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **how: Any) -> Any:
        """Return `log_probs` and `entropy` of `[B, T]` rows, `[B, logits_to_keep]`.

        They are 0 without a gradient on padding and for rows that are not read. Rows with a hole between their tokens,
        or without a prompt, are computed as rows.
        """
        rows = input_ids.masked_fill(attention_mask == 0, -1).cpu().numpy()
        width = rows.shape[1] - self.logits_to_keep
        read = np.array((rows[:, width:] >= 0).any(1))
        if self.live is not None:
            read &= self.live.cpu().numpy()
        chosen = np.flatnonzero(read).tolist()
        if self.tree and chosen and _is_regular(rows, width):
            output, nodes, attention = call_on_tree(self.model, rows, width, chosen, input_ids.device, **how)
            self.tokens["computed"] += attention.nodes
        else:
            chosen = chosen or [0]  # the other processes wait for its gradient of zero
            index = torch.tensor(chosen, device=input_ids.device)
            ids, mask, labels = (x.index_select(0, index) for x in (input_ids, attention_mask, labels))
            output = self.model(input_ids=ids, attention_mask=mask, labels=labels, **how)
            nodes = np.full((len(rows), rows.shape[1] - 1), -1)  # the head shifts the labels by one
            nodes[chosen] = np.arange(nodes[chosen].size).reshape(len(chosen), -1)
            nodes[(rows[:, 1:] < 0) | ~read[:, None]] = -1
            self.tokens["computed"] += output.log_probs.numel()
        return self._of_rows(output, torch.from_numpy(nodes[:, -self.logits_to_keep :]))

    def _of_rows(self, output: Any, nodes: Tensor) -> Any:
        """Gather the scores `[B, logits_to_keep]`; a node serves all its rows, and receives the gradients of all."""
        index = nodes.masked_fill(nodes < 0, output.log_probs.numel()).flatten().to(output.log_probs.device)

        def of_rows(values: Tensor) -> Tensor:
            return pad(values.flatten(), (0, 1)).index_select(0, index).view(nodes.shape)

        log_probs = of_rows(output.log_probs)
        if self.unread is not None and self.live is not None:
            unread = self.unread[:, : nodes.shape[1]].to(log_probs.dtype)
            log_probs = torch.where(self.live.unsqueeze(1), log_probs, unread)
        return type(output)(log_probs=log_probs, entropy=None if output.entropy is None else of_rows(output.entropy))


def call_on_tree(
    model: nn.Module, rows: NDArray[np.int64], width: int, chosen: list[int], device: torch.device, **how: Any
) -> tuple[Any, NDArray[np.int64], TreeAttention]:
    """Call a model on the tree of the chosen rows, whose prompts have `width` columns.

    The model is given the attention of the tree, and a mask of four dimensions, which keeps transformers from building
    one of its own.

    Returns:
        The model's output for the tokens of completions; which of them are the columns of each row; the attention.
    """
    tree = prefix_tree(rows, width, chosen)
    scored = np.flatnonzero(tree.columns >= width - 1)
    inputs = (tree.tokens, tree.columns, tree.labels[scored], scored)
    ids, positions, labels, index = (torch.from_numpy(x).unsqueeze(0).to(device) for x in inputs)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    how[KEYWORD] = attention = TreeAttention(tree.branches, device)

    def leave_scored(module: nn.Module, given: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, index[0])

    backbone = next(part for part in model.modules() if isinstance(part, PreTrainedModel)).base_model
    with backbone.register_forward_hook(leave_scored):
        output = model(input_ids=ids, position_ids=positions, shift_labels=labels, attention_mask=mask, **how)
    place = np.full(len(tree.tokens) + 1, -1)  # the last entry is that of columns without a node
    place[scored] = np.arange(len(scored))
    return output, place[tree.nodes], attention


def _is_regular(rows: NDArray[np.int64], width: int) -> bool:
    """Return whether each row has a prompt that ends, and a completion that begins, at the border between them."""
    real = rows >= 0
    prompts, completions = real[:, :width], real[:, width:]
    rises = (prompts[:, 1:] >= prompts[:, :-1]).all() and prompts[:, -1:].all(1).all()
    return bool(width and rises and (completions[:, 1:] <= completions[:, :-1]).all())


@dataclass(frozen=True)
class Probe:
    """Whether a model computes trees, and how.

    Args:
        why_rows: why it must compute rows one by one; None if it computes trees.
        kernels: what computes the attention of its layers, each once.
        failed: whether the pass over a tree raised an error or returned other numbers, which may be the fault of the
            kernels.
    """

    why_rows: str | None
    kernels: tuple[str, ...] = ()
    failed: bool = False

    def __str__(self) -> str:
        if self.why_rows is not None:
            return f"rows: {self.why_rows}"
        return f"prefix trees, with {' and '.join(self.kernels)}"


def why_rows(model: Any, call: nn.Module, *, tolerance: float = 1e-3) -> str | None:
    """Return why a model must compute rows one by one, None if it computes trees: see `probe_trees`."""
    return probe_trees(model, call, tolerance=tolerance).why_rows


def probe_trees(
    model: Any, call: nn.Module, *, tolerance: float = 1e-3, on_any_process: Callable[[bool], bool] = bool
) -> Probe:
    """Return whether a model computes trees, by two small passes, and with which attention.

    Call this on every process that shares the weights, in the precision in which the model trains (under autocast if it
    trains under autocast), since the precision decides which attention is computed. A model that computes trees but for
    its eager attention is given `sdpa`.

    Args:
        model: the bare model, with or without adapters.
        call: the model as it is trained: wrapped by what shares its weights.
        tolerance: how far the log-probabilities of a tree may be from those of its rows, as a share of their spread
            over tokens: by rounding 1e-6 in float32 and up to 0.05 in 16 bits; by wrong positions at least 0.3.
        on_any_process: returns whether a flag is true on any of the processes, which must repeat a probe together.
    """
    reason = _why_not_probed(model)
    if reason is not None:
        return Probe(reason)
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before == "eager" and model._supports_sdpa:  # the only one that is not in transformers' table
        config._attn_implementation = "sdpa"
    device = next(model.parameters()).device
    probe = _compare(call, device, config, tolerance)
    if hardware(device)[0] == "cuda" and on_any_process(probe.failed):
        # Perhaps only torch's variable-length call fails here, as in a build without FlashAttention.
        avoid_variable_length(device, True)
        probe = _compare(call, device, config, tolerance)
        if probe.failed:
            avoid_variable_length(device, False)
    if probe.why_rows is not None:
        config._attn_implementation = before
    return probe


def _why_not_probed(model: Any) -> str | None:
    """Return why a model cannot compute trees if its configuration says so."""
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        return "its adapter adds tokens to the prompt"
    if rope_types(config) & {"dynamic", "longrope"}:
        return "its rotary frequencies depend on the length of the batch"
    if other:
        return f"it has layers of {', '.join(sorted(other))}"
    if _draws_noise(model):
        return "it has dropout or other noise"
    if getattr(config, "output_router_logits", False):
        return "its loss reads the router of its experts"
    return None


def _draws_noise(model: Any) -> bool:
    """Return whether a model in training draws random numbers: equal rows then differ."""
    config = model.config.get_text_config().to_dict()
    named = any(value for name, value in config.items() if name == "attention_dropout" or "jitter" in name)
    dropout = any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in model.modules())
    return dropout or (named and model.training)


def _compare(call: nn.Module, device: torch.device, config: Any, tolerance: float) -> Probe:
    """Compare a small tree with its rows, without a gradient."""
    teach_attention_trees()
    prompts, completions = torch.tensor([[5], [5], [2], [2]]), torch.tensor([[4], [4], [1], [4]])
    place = torch.arange(9)
    mask = ((place >= 5 - prompts) & (place < 5 + completions)).long()
    ids = (torch.arange(36).view(4, 9) * 7 + 3) % min(config.vocab_size, 97)
    ids[1, :7], ids[3, :5] = ids[0, :7], ids[2, :5]  # the first two part after two tokens of the completion
    rows = ids.masked_fill(mask == 0, -1).numpy()
    ids, mask = ids.to(device), mask.to(device)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :5] = IGNORED
    with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradient checkpointing without a gradient
        expected = call(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -4:]
        try:
            output, nodes, attention = call_on_tree(call, rows, 5, [0, 1, 2, 3], device, fused_lm_head=True)
        except UnsupportedAttentionError as error:
            return Probe(str(error))
        except Exception as error:  # a model, or a kernel, may raise anything
            return Probe(f"a pass over a tree failed: {type(error).__name__}: {error}", failed=True)
    if not attention.windows:
        return Probe(f"its attention ({config._attn_implementation}) takes no trees")
    kinds = getattr(config, "layer_types", None) or ()
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None))
    if windowed and attention.windows == {0}:
        return Probe("its attention does not state its sliding window")
    real = labels[:, -4:] >= 0
    got = output.log_probs.flatten()[torch.from_numpy(nodes[:, -4:]).to(device)[real]].float()
    other = expected[real].float()
    apart = ((got - other).norm() / (other - other.mean()).norm()).item()
    if not apart <= tolerance:
        return Probe(f"its log-probabilities differ in a tree, by {apart:.1g} of their spread", failed=True)
    kernels = [str(kernel) for kernel in attention.kernels.values()]
    return Probe(None, tuple(dict.fromkeys(kernels)))
