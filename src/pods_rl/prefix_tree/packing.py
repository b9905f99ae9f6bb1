"""TRL's pass for log-probabilities over a prefix tree: each distinct prefix of the rows once, and nothing else.

The nodes of the tree are one sequence without padding. Every token keeps the position that it has in the batch of rows,
so the scores are those of the rows up to rounding.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    move_together,
    register_tree_attention,
)
from .cache import rope_types
from .recurrence import LAYER_TYPES as RECURRENT_TYPES
from .recurrence import RECURRENCE_KEYWORD, TreeRecurrence, recurrence_modules, register_tree_recurrence
from .tree import prefix_tree

# Names that configurations give to layers.
ATTENTION_TYPES = {"full_attention", "sliding_attention"}
TOKEN_TYPES = {"mlp", "moe"}  # of layers that compute each token by itself

IGNORED = -100  # the label of a token that is not scored
_END_TOKEN = 2**31  # a token of no vocabulary, which follows each row's last one where that must have a node too


@dataclass(frozen=True)
class TreePass:
    """What TRL's `_get_per_token_logps_and_entropies` calls as its model, once per batch.

    The model is called exactly once in each call, so that processes that share its weights stay in step.
    """

    model: nn.Module  # a causal language model with TRL's fused head, wrapped or not
    logits_to_keep: int  # columns of the completion
    tree: bool  # whether the model computes trees; else the rows that are read are computed as rows
    read: Tensor | None = None  # [B], whether the results of a row are read. If None, all are
    unread_log_probs: Tensor | None = None  # [B, T], to return for the others. If None, 0
    tokens: Counter[str] = field(default_factory=Counter)  # grows by the tokens of each pass, as `computed`

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> Any:
        """Return `log_probs` and `entropy` of `[B, T]` rows, `[B, logits_to_keep]`.

        They are 0 without a gradient on padding and for rows that are not read. Rows with a hole between their tokens,
        or without a prompt, are computed as rows. If TRL requests the auxiliary loss of experts, which counts every
        token of every row, `aux_loss` is that of the rows.
        """
        ignored = attention_mask == 0  # [B, T]
        if self.read is not None:
            ignored = ignored | ~self.read.unsqueeze(1)
        # The layout of the tree is computed on the CPU. This copy is the only wait for the device.
        rows = input_ids.masked_fill(ignored, -1).cpu().numpy()
        prompt_width = rows.shape[1] - self.logits_to_keep
        counts_every_token = bool(options.get("output_router_logits"))
        counted = rows if counts_every_token else rows[:, prompt_width:]
        chosen = np.flatnonzero((counted >= 0).any(1))
        device = input_ids.device
        if self.tree and len(chosen) and is_regular(rows[chosen], prompt_width):
            inputs = lay_out_tree(rows, prompt_width, chosen.tolist(), device, every_token=counts_every_token)
            index = self._index(inputs.score_of_column, len(inputs.scored), device)
            output = call_on_tree(self.model, inputs, **options)
            self.tokens["computed"] += inputs.attention.nodes
            return self._of_columns(output, index)
        # The chosen rows are computed one by one.
        if len(chosen) == 0:
            chosen = np.zeros(1, np.int64)  # the other processes wait for the first row's gradient of zero
        columns = rows.shape[1] - 1  # the head shifts the labels by one
        score_of_column = np.full((len(rows), columns), -1)
        score_of_column[chosen] = np.arange(len(chosen) * columns).reshape(len(chosen), columns)
        score_of_column[rows[:, 1:] < 0] = -1
        index = self._index(score_of_column, len(chosen) * columns, device)
        chosen_rows = torch.from_numpy(chosen).to(device)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        chosen_batch = {name: values.index_select(0, chosen_rows) for name, values in batch.items()}
        output = self.model(**chosen_batch, **options)
        self.tokens["computed"] += output.log_probs.numel()
        return self._of_columns(output, index)

    def _index(self, score_of_column: NDArray[np.int64], count: int, device: torch.device) -> Tensor:
        """Return which score each column of the completions has, `[B, logits_to_keep]`; `count` where there is none."""
        # Copied before the model is called, since a copy waits for all that was started.
        completions = score_of_column[:, -self.logits_to_keep :]
        return torch.from_numpy(np.where(completions < 0, count, completions)).to(device)

    def _of_columns(self, output: Any, index: Tensor) -> Any:
        """Gather the scores `[B, logits_to_keep]`; a node serves all its rows, and receives the gradients of all."""
        index = index.to(output.log_probs.device)  # a model over several devices may end on another one
        log_probs = _select_scores(output.log_probs, index)
        entropy = None if output.entropy is None else _select_scores(output.entropy, index)
        if self.unread_log_probs is not None and self.read is not None:
            unread = self.unread_log_probs[:, : index.shape[1]].to(log_probs.dtype)
            log_probs = torch.where(self.read.unsqueeze(1), log_probs, unread)
        return type(output)(log_probs=log_probs, entropy=entropy, aux_loss=output.aux_loss)


def _select_scores(scores: Tensor, index: Tensor) -> Tensor:
    """Return the scores with these numbers; the number after the last is that of a 0."""
    # TRL's head returns float32, in which the gradients of the rows of a node are added up.
    with_zero = pad(scores.flatten(), (0, 1))
    return with_zero.index_select(0, index.flatten()).view(index.shape)


@dataclass(frozen=True)
class TreeInputs:
    """A tree of rows as a model computes it. Its S scored nodes predict the tokens of completions."""

    ids: Tensor  # [1, L], the tokens of the nodes
    positions: Tensor  # [1, L], their columns in the batch of rows
    labels: Tensor  # [1, S], the tokens that the scored nodes predict
    scored: Tensor  # [S], the numbers of the scored nodes
    score_of_column: NDArray[np.int64]  # [B, T - 1], the number of each column's score; -1 where there is none
    attention: TreeAttention
    recurrence: TreeRecurrence
    rows_of_node: Tensor | None = None  # [1, L], how many rows contain each node, where every token has one


def lay_out_tree(
    rows: NDArray[np.int64],
    prompt_width: int,
    chosen: list[int],
    device: torch.device,
    *,
    every_token: bool = False,
    call_tokens: int | None = None,
) -> TreeInputs:
    """Return the tree of the chosen rows `[B, T]` as a model computes it.

    Args:
        every_token: whether a row's last token, which predicts nothing, has a node too.
        call_tokens: see `TreeRecurrence`.
    """
    columns = rows.shape[1]
    if every_token:  # each row is followed by `_END_TOKEN`, so that its last token has a node
        is_token = rows >= 0
        ends = columns - is_token[:, ::-1].argmax(1)  # [B], the column after each row's last token
        rows = np.pad(rows, ((0, 0), (0, 1)), constant_values=-1)
        rows[np.arange(len(rows)), ends] = _END_TOKEN
    tree = prefix_tree(rows, prompt_width, chosen)
    scored = np.flatnonzero((tree.columns >= prompt_width - 1) & (tree.labels != _END_TOKEN))
    rows_of_node = None
    if every_token:
        counts = np.bincount(tree.nodes[tree.nodes >= 0], minlength=len(tree.tokens))
        rows_of_node = torch.from_numpy(counts).unsqueeze(0).to(device)
    score_of_node = np.full(len(tree.tokens) + 1, -1)  # the last entry is that of columns without a node
    score_of_node[scored] = np.arange(len(scored))
    ids, positions, labels, scored_nodes = move_together(
        [tree.tokens, tree.columns, tree.labels[scored], scored], device
    )
    return TreeInputs(
        ids=ids.unsqueeze(0),
        positions=positions.unsqueeze(0),
        labels=labels.unsqueeze(0),
        scored=scored_nodes,
        score_of_column=score_of_node[tree.nodes[:, : columns - 1]],
        attention=TreeAttention(tree.branches, device),
        recurrence=TreeRecurrence(tree.branches, device, call_tokens),
        rows_of_node=rows_of_node,
    )


def call_on_tree(model: nn.Module, inputs: TreeInputs, **options: Any) -> Any:
    """Call a model on a tree; return its output for the scored nodes."""

    def leave_scored(module: nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, inputs.scored)  # [1, S, hidden size]

    backbone = next(part for part in model.modules() if isinstance(part, PreTrainedModel)).base_model
    # A mask of four dimensions keeps transformers from building one of its own.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.ids.device)

    def hide_counts(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": mask}

    options[KEYWORD] = inputs.attention
    if recurrence_modules(model):
        register_tree_recurrence(model)
        options[RECURRENCE_KEYWORD] = inputs.recurrence
        options["use_cache"] = False  # a tree has no last state
    # The loss of experts weighs tokens by the mask: here a node counts as often as rows contain it.
    weights = mask if inputs.rows_of_node is None else inputs.rows_of_node
    with (
        backbone.register_forward_pre_hook(hide_counts, with_kwargs=True),
        backbone.register_forward_hook(leave_scored),
    ):
        return model(
            input_ids=inputs.ids,
            position_ids=inputs.positions,
            shift_labels=inputs.labels,
            attention_mask=weights,
            **options,
        )


@contextmanager
def temporarily(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes (an object, a name, a value) until the end."""
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in attributes]
    for holder, name, value in attributes:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def is_regular(rows: NDArray[np.int64], prompt_width: int) -> bool:
    """Return whether each row has a prompt that ends, and a completion that begins, at the border between them."""
    if prompt_width == 0:
        return False
    is_token = rows >= 0
    prompts = is_token[:, :prompt_width]
    completions = is_token[:, prompt_width:]
    if not prompts[:, -1].all():
        return False
    # Padding comes before the tokens of a prompt, and after those of a completion.
    prompts_rise = (prompts[:, 1:] >= prompts[:, :-1]).all()
    completions_fall = (completions[:, 1:] <= completions[:, :-1]).all()
    return bool(prompts_rise and completions_fall)


@dataclass(frozen=True)
class Probe:
    """Whether a model computes trees, and how."""

    why_rows: str | None  # why it must compute rows one by one; None if it computes trees
    kernels: tuple[str, ...] = ()  # what computes the attention of its layers, each once
    failed: bool = False  # whether a tree raised an error or gave other numbers, perhaps by the fault of the kernels

    def __str__(self) -> str:
        if self.why_rows is not None:
            return f"rows: {self.why_rows}"
        if not self.kernels:
            return "prefix trees"
        return f"prefix trees, with attention by {' and by '.join(self.kernels)}"


def probe_trees(
    model: Any,
    call: nn.Module,
    *,
    tolerance: float = 1e-3,
    on_any_process: Callable[[bool], bool] = bool,
    trains: bool = True,
) -> Probe:
    """Return whether a model computes trees, by two small passes and their gradients, and with which attention.

    Call this on every process that shares the weights, in the precision in which the model trains (under autocast if it
    trains under autocast), since the precision decides which attention is computed. A model that computes trees but for
    its eager attention is given `sdpa`.

    Args:
        call: the model as it is trained: wrapped by what shares its weights.
        tolerance: how far the log-probabilities of a tree may be from those of its rows, as a share of their spread
            over tokens: by rounding 1e-6 in float32 and up to 0.05 in 16 bits; by wrong positions at least 0.3.
        on_any_process: returns whether a flag is true on any of the processes, which must repeat a probe together.
        trains: whether the model is trained. Then gradients are compared too, unless its weights are sharded.
    """
    reason = _why_not_probed(model)
    if reason is not None:
        return Probe(reason)
    config = model.config.get_text_config()
    before = config._attn_implementation
    # Older transformers lets sdpa compute Gemma 2's rows, and it ignores their softcap.
    has_softcap = bool(getattr(config, "attn_logit_softcapping", None))
    if before == "eager" and model._supports_sdpa and not has_softcap:  # eager is not in transformers' table
        config._attn_implementation = "sdpa"
    device = next(model.parameters()).device

    def compare() -> Probe:
        probe = _compare_with_rows(call, device, config, tolerance)
        # Older torch (2.6 to 2.9, perhaps later) also keeps the casts of a pass without a gradient for the next pass of
        # an autocast block, where the weights would get none.
        torch.clear_autocast_cache()
        if probe.why_rows is None and trains:
            wrong = _wrong_gradients(model, device, config, tolerance)
            probe = probe if wrong is None else Probe(wrong, failed=True)
        return probe

    probe = compare()
    if hardware(device)[0] == "cuda" and on_any_process(probe.failed):
        # Perhaps only torch's variable-length call fails here, as in a build without FlashAttention.
        avoid_variable_length(device, True)
        probe = compare()
        if probe.failed:
            avoid_variable_length(device, False)
    if probe.why_rows is not None:
        config._attn_implementation = before
    return probe


def _why_not_probed(model: Any) -> str | None:
    """Return why a model cannot compute trees if its configuration says so."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    unsupported = layer_types - ATTENTION_TYPES - TOKEN_TYPES
    if recurrence_modules(model):
        unsupported -= RECURRENT_TYPES
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            return "its adapter adds tokens to the prompt"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "its adapter begins after the invocation tokens of each row (alora_invocation_tokens)"
    if any(getattr(part, "neftune_noise_alpha", None) for part in model.modules()):
        return "the noise of its embeddings (NEFTune) depends on the length of the rows"
    if rope_types(config) & {"dynamic", "longrope"}:
        return "its rotary frequencies depend on the length of the batch"
    if unsupported:
        return f"it has {', '.join(sorted(unsupported))} layers of a kind that is not computed over trees"
    return None


def without_noise(model: nn.Module) -> AbstractContextManager[None]:
    """Set dropout, jitter and embedding noise to 0, so that a tree can be compared with its rows."""
    # The mode stays that of training, which may compute a layer in another way than evaluation does.
    noise: list[tuple[Any, str, Any]] = []
    for part in model.modules():
        # Some modules read the model's configuration each time.
        for holder in (part, getattr(part, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                is_dropout = isinstance(holder, nn.modules.dropout._DropoutNd)
                is_noise = name == "p" if is_dropout else any(word in name for word in ("drop", "jitter", "noise"))
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_noise and is_number and value > 0:
                    noise.append((holder, name, 0.0))
    return temporarily(noise)


def without_checkpoints(model: nn.Module) -> AbstractContextManager[None]:
    """Keep all activations of a small pass: `torch.autograd.grad` does not work with reentrant checkpoints."""
    parts = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False) is True]
    return temporarily([(part, "gradient_checkpointing", False) for part in parts])


_PROBE_WIDTH = 5  # columns of the prompts of the probe


class _ProbeBatch:
    """The rows of a probe, `[4, 9]` of two prompts with two completions each, and their tree."""

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        prompt_lengths = torch.tensor([[5], [5], [2], [2]])
        completion_lengths = torch.tensor([[4], [4], [1], [4]])
        columns = torch.arange(9)
        is_token = (columns >= _PROBE_WIDTH - prompt_lengths) & (columns < _PROBE_WIDTH + completion_lengths)
        ids = (torch.arange(36).view(4, 9) * 7 + 3) % min(vocabulary, 97)
        ids[1, :7] = ids[0, :7]  # the first two part after two tokens of the completion
        ids[3, :5] = ids[2, :5]
        mask = is_token.long()
        self.keep = ids.shape[1] - _PROBE_WIDTH
        rows = ids.masked_fill(mask == 0, -1).numpy()
        # Few tokens a call, so that states are passed on, as they are in a large tree.
        self.tree = lay_out_tree(rows, _PROBE_WIDTH, [0, 1, 2, 3], device, call_tokens=1)
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, :_PROBE_WIDTH] = IGNORED
        self._inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}
        self._is_scored = self._inputs["labels"][:, -self.keep :] >= 0
        score_of_column = torch.from_numpy(self.tree.score_of_column[:, -self.keep :]).to(device)
        self._scores = score_of_column[self._is_scored]

    def by_rows(self, call: nn.Module) -> Tensor:
        """Return the log-probabilities of all scored tokens, row by row."""
        torch.manual_seed(0)  # what is drawn once for a pass, and not for each token, is the same in both
        log_probs: Tensor = call(**self._inputs, fused_lm_head=True).log_probs[:, -self.keep :]
        return log_probs[self._is_scored].float()

    def by_tree(self, call: nn.Module) -> Tensor:
        """Return the same, computed over the tree."""
        torch.manual_seed(0)
        log_probs: Tensor = call_on_tree(call, self.tree, fused_lm_head=True).log_probs
        return log_probs.flatten()[self._scores].float()


def _own_draws() -> AbstractContextManager[None]:
    """Put the random states of the CPU and of all GPUs back at the end."""
    # Without this list torch warns where there are several GPUs.
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


def _compare_with_rows(call: nn.Module, device: torch.device, config: Any, tolerance: float) -> Probe:
    """Compare a small tree with its rows, without a gradient."""
    register_tree_attention(call)
    batch = _ProbeBatch(device, config.vocab_size)
    buffers = _buffers(call)
    with torch.no_grad(), _own_draws(), without_noise(call), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradient checkpointing without a gradient
        expected = batch.by_rows(call)
        try:
            log_probs = batch.by_tree(call)
        except UnsupportedAttentionError as error:
            return Probe(str(error))
        except Exception as error:  # a model, or a kernel, may raise anything
            return Probe(f"a pass over a tree failed: {type(error).__name__}: {error}", failed=True)
    attention = batch.tree.attention
    recurrence = batch.tree.recurrence
    all_types = getattr(config, "layer_types", None) or ()
    has_windows = "sliding_attention" in all_types if all_types else bool(getattr(config, "sliding_window", None))
    layer_types = all_types[: getattr(config, "num_hidden_layers", None)]
    recurrent_layers = sum(kind in RECURRENT_TYPES for kind in layer_types)
    if not layer_types and recurrence_modules(call):
        recurrent_layers = 1  # at least
    if recurrence.layers < recurrent_layers:
        return Probe(f"{recurrent_layers} of its layers are recurrent, and {recurrence.layers} took a tree")
    has_attention = not layer_types or bool(ATTENTION_TYPES & set(layer_types))
    if has_attention and not attention.windows:
        return Probe(f"its layers ({type(call).__name__}) do not call an attention function of transformers")
    if has_windows and attention.windows == {0}:
        return Probe("its attention does not state its sliding window")
    changed = [name for name, state in _buffers(call).items() if buffers.get(name) != state]
    if changed:
        return Probe(f"a pass changes {changed[0]}, which may count the tokens of every row")
    distance = ((log_probs - expected).norm() / (expected - expected.mean()).norm()).item()
    if not distance <= tolerance:  # also NaN
        return Probe(f"its log-probabilities differ in a tree, by {distance:.1g} of their spread", failed=True)
    kernels = [str(kernel) for kernel in attention.kernels.values()]
    return Probe(None, tuple(dict.fromkeys(kernels)))


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensor each buffer is, and how often it was changed in place."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}


def _wrong_gradients(model: nn.Module, device: torch.device, config: Any, tolerance: float) -> str | None:
    """Return what differs between the gradients of a small tree and of its rows; None if nothing does."""
    # A term that is 0 at the initial weights, or the same for all keys, changes no value, but has a gradient.
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not weights or any(hasattr(weight, "to_local") or hasattr(weight, "ds_id") for weight in weights.values()):
        return None  # sharded weights have their gradients in parts
    batch = _ProbeBatch(device, config.vocab_size)

    def gradients(log_probs: Tensor) -> dict[str, Tensor]:
        factors = torch.arange(len(log_probs), device=log_probs.device).cos()
        of_weights = torch.autograd.grad((log_probs * factors).sum(), list(weights.values()), allow_unused=True)
        pairs = zip(weights, of_weights, strict=True)
        return {name: torch.zeros(1) if gradient is None else _sketch(gradient) for name, gradient in pairs}

    with torch.enable_grad(), _own_draws(), without_noise(model), without_checkpoints(model):
        try:
            of_rows = gradients(batch.by_rows(model))
            of_tree = gradients(batch.by_tree(model))
        except Exception as error:
            return f"its gradient over a tree failed: {type(error).__name__}: {error}"
    size = torch.stack([gradient.norm() for gradient in of_rows.values()]).norm().item()
    for name, gradient in of_rows.items():
        expected = gradient.norm().item()
        found = of_tree[name].norm().item()
        if (expected == 0) != (found == 0) and expected + found > tolerance / 100 * size:
            return f"{name} has a gradient {'in a tree' if found else 'in rows'} only"
        if expected == 0 or found == 0:
            continue
        distance = (of_tree[name] - gradient).norm().item() / max(expected, size / 100)
        if not distance <= 3 * tolerance:
            return f"the gradient of {name} differs in a tree, by {distance:.1g} of its size"
    return None


def _sketch(gradient: Tensor) -> Tensor:
    """Return random sums of a gradient, whose distance is that of the gradients, in a share of their memory."""
    matrix = gradient.flatten(1) if gradient.ndim > 1 else gradient.unsqueeze(0)
    if matrix.size(0) > matrix.size(1):
        matrix = matrix.transpose(0, 1)
    signs = torch.randn(matrix.size(0), generator=torch.Generator().manual_seed(1)).sign()
    return (signs.to(matrix) @ matrix).float().cpu()
