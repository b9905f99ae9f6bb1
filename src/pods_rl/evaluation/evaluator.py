"""An evaluation: test prompts, completions sampled by any backend, grades."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..distributed import busy
from ..policies.loading import encode, render
from ..tasks import Task
from .processes import gather, own_rows
from .scores import Answer, Evaluation, summarise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowsDone = Callable[[int, int], None]  # called with the rows done and all rows of this process


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled: from the whole distribution, without top-k, top-p or penalties.

    Args:
        temperature: 0 means greedy.
        max_completion_length: tokens after which a completion is cut.
        batch_size: rows that `generate` completes at once.
        seed: of all draws. Each row has draws of its own, so batches and processes change none.
        chat_template_kwargs: further arguments of the chat template.
    """

    temperature: float = 1.0
    max_completion_length: int = 256
    batch_size: int = 256
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.max_completion_length < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError(
                f"got {self}: expected a temperature and a seed of at least 0, a max_completion_length and a "
                "batch_size of at least 1"
            )


@dataclass(frozen=True)
class Completion:
    """One sampled completion: its text without special tokens, its length in tokens, and whether it ended itself."""

    text: str
    tokens: int
    ended: bool


class Sampler(Protocol):
    """A policy that completes prompts; `backend` names how."""

    backend: str
    tokenizer: PreTrainedTokenizerBase

    def sample(
        self, prompts_ids: Sequence[Sequence[int]], rows: Sequence[int], how: Sampling, done: RowsDone
    ) -> list[Completion]:
        """Return a completion of each prompt (token ids), in order; `rows` number them and so choose their draws."""


def evaluate(
    sampler: Sampler,
    task: Task,
    sampling: Sampling,
    *,
    prompts: int | None = None,
    repeats: int = 1,
    done: RowsDone = lambda rows, of: None,
) -> Evaluation:
    """Sample `repeats` completions of each of the first `prompts` test prompts and grade them.

    With several processes (`torch.distributed`) each one completes its share of the rows and all of them return the
    whole result: the same as one process's, up to rounding in a batch.

    Args:
        sampler: the policy.
        task: its test prompts and its grader.
        sampling: how completions are drawn.
        prompts: how many of the test split's prompts, from its start. None: all.
        repeats: completions per prompt; pass@k is measured for k in powers of two up to it.
        done: called with the rows done, to show progress.

    Raises:
        ValueError: prompts or repeats below 1.
        UserError: the task's prompts cannot be written for this policy.
    """
    if repeats < 1 or (prompts is not None and prompts < 1):
        raise ValueError(f"prompts = {prompts}, repeats = {repeats}: expected at least 1 of each")
    started = time.perf_counter()
    count = len(task.test) if prompts is None else min(prompts, len(task.test))
    rows = own_rows(count * repeats)
    with busy("evaluation"):
        own = _answer(sampler, task, sampling, rows, repeats, done)
    answers = sorted(gather(own), key=lambda answer: (answer.index, answer.repeat))
    seconds = time.perf_counter() - started
    return summarise(answers, repeats=repeats, temperature=sampling.temperature, seconds=seconds)


def _answer(
    sampler: Sampler, task: Task, sampling: Sampling, rows: Sequence[int], repeats: int, done: RowsDone
) -> list[Answer]:
    """Complete and grade some rows; row r is repeat r % repeats of prompt r // repeats."""
    picked = task.test.select([row // repeats for row in rows])
    questions, golds = list(picked["prompt"]), list(picked["answer"])
    texts = [render(sampler.tokenizer, question, **sampling.chat_template_kwargs) for question in questions]
    ids = [encode(sampler.tokenizer, question, text) for question, text in zip(questions, texts, strict=True)]
    completions = sampler.sample(ids, rows, sampling, done)
    grades = task.grade([completion.text for completion in completions], golds)
    return [
        Answer(row // repeats, row % repeats, text, gold, c.text, grade.answer, grade.format, c.tokens, c.ended)
        for row, text, gold, c, grade in zip(rows, texts, golds, completions, grades, strict=True)
    ]
