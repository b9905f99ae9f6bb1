"""An evaluation: test prompts, sampled completions, grades."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..distributed import busy
from ..policies.loading import encode, render
from ..tasks import Task
from .processes import gather, own_rows
from .sampling import RowsDone, Sampler, Sampling
from .scores import Answer, Evaluation, summarise


def evaluate(
    sampler: Sampler,
    task: Task,
    sampling: Sampling,
    *,
    prompts: int | None = None,
    repeats: int = 1,
    done: RowsDone = lambda rows, of: None,
) -> Evaluation:
    """Sample `repeats` completions to each of the first `prompts` test prompts and grade them.

    Under several processes (`torch.distributed`) each one answers its share of the rows and all of them get the
    whole result: the same as one process's, up to rounding in a batch.

    Args:
        sampler: the policy.
        task: what to answer and how it is graded.
        sampling: how completions are drawn.
        prompts: how many of the test split's prompts, from its start. None: all.
        repeats: completions per prompt; pass@k is measured for k in powers of two up to it.
        done: told of the rows done, for a person who waits.

    Raises:
        ValueError: prompts or repeats below 1.
        UserError: the task's prompts cannot be written for this policy.
    """
    if repeats < 1 or (prompts is not None and prompts < 1):
        raise ValueError(f"prompts = {prompts}, repeats = {repeats}: expected at least 1 of each")
    started = time.perf_counter()
    count = len(task.test) if prompts is None else min(prompts, len(task.test))
    own = own_rows(count * repeats)
    with busy("evaluation"):
        given = _answer(sampler, task, sampling, own, repeats, done)
    answers = gather(given)
    return summarise(
        sorted(answers, key=lambda answer: (answer.index, answer.repeat)),
        repeats=repeats,
        temperature=sampling.temperature,
        seconds=time.perf_counter() - started,
    )


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
