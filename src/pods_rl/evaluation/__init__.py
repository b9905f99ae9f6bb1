"""Evaluation: accuracy, pass@k and form of a policy on a task, during training or of any checkpoint."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..distributed.processes import gather, own_rows
from ..loading.prompts import encode, render, tool_options
from ..loading.turns import TurnReader
from ..tasks import Grade, Task, last_turn
from .conversation import converse
from .sampling import Completion, GenerateSampler, RowsDone, Sampler, Sampling

__all__ = [
    "Answer", "Completion", "Evaluation", "GenerateSampler", "Sampler", "Sampling", "evaluate", "pass_at_k",
]  # fmt: skip


def evaluate(
    sampler: Sampler,
    task: Task,
    sampling: Sampling,
    *,
    prompts: int | None = None,
    repeats: int = 1,
    done: RowsDone = lambda rows, of: None,
    loop: asyncio.AbstractEventLoop | None = None,
    tools: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Sample `repeats` completions of each of the first `prompts` test prompts and grade them.

    With several processes (`torch.distributed`) each completes its share of the rows, and all return the result of one
    process, up to rounding in a batch.

    Args:
        sampler: the policy.
        task: its test prompts and its grader.
        sampling: how completions are drawn.
        prompts: the number of test prompts, from the first. If None, all.
        repeats: completions per prompt; pass@k is measured for k in powers of two up to it.
        done: called with the number of finished rows, to show progress.
        loop: runs the coroutines of tools and environments (see `converse`).
        tools: what `tool_options` returned for the task. If None, it is called, which makes an environment.

    Raises:
        UserError: the task's prompts cannot be rendered for this policy, or it cannot call the task's tools.
    """
    started = time.perf_counter()
    count = len(task.test) if prompts is None else min(prompts, len(task.test))
    rows = own_rows(count * repeats)  # row r is repeat r % repeats of prompt r // repeats
    picked = task.test.select([row // repeats for row in rows])
    if tools is None:
        tools = tool_options(sampler.tokenizer, task)
    options = {**sampling.chat_template_kwargs, **tools}
    turns = TurnReader(sampler.tokenizer, options)
    if task.converses:
        with_options = replace(sampling, chat_template_kwargs=options)
        conversations = converse(sampler, task, list(picked), rows, with_options, done, loop)
        sampled = [
            _Sampled(
                prompt=conversation.prompt,
                completion=Completion(last_turn(conversation.messages), conversation.tokens, conversation.ended),
                graded_text=turns.text(conversation.prompt, conversation.messages, conversation.ids),
                length=len(conversation.ids),
                messages=json.dumps(conversation.messages, ensure_ascii=False, default=str),
                environment_reward=conversation.reward,
            )
            for conversation in conversations
        ]
    else:
        questions = list(picked["prompt"])
        prompts_text = [render(sampler.tokenizer, question, **options) for question in questions]
        with_text = zip(questions, prompts_text, strict=True)
        prompts_ids = [encode(sampler.tokenizer, question, text) for question, text in with_text]
        completions = sampler.sample(prompts_ids, rows, sampling, done)
        sampled = [
            _Sampled(text, completion, turns.text(text, completion.text, completion.ids), completion.tokens)
            for text, completion in zip(prompts_text, completions, strict=True)
        ]
    golds = list(picked["answer"])
    texts = [row.graded_text for row in sampled]
    environment_rewards = [row.environment_reward for row in sampled] if task.converses else None
    # right or not, or their rewards if nothing says which are right
    grades = [Grade(answer=False, format=False)] * len(texts)
    parts: list[dict[str, float]] = [{}] * len(texts)
    if task.answer is None:
        if not any(row.environment_reward is not None for row in sampled):  # none has an environment with `get_reward`
            environment_rewards = None
        lengths = [row.length for row in sampled]
        parts = task.reward_parts(texts, golds, lengths, sampling.max_completion_length, environment_rewards)
    else:
        grades = task.grade(texts, golds, environment_rewards)
    answers_here = [
        Answer(
            index=row // repeats,
            repeat=row % repeats,
            prompt=sample.prompt,
            answer=gold,
            completion=sample.completion.text,
            answer_right=grade.answer,
            format_kept=grade.format,
            completion_tokens=sample.completion.tokens,
            ended=sample.completion.ended,
            messages=sample.messages,
            rewards=rewards,
        )
        for row, sample, gold, grade, rewards in zip(rows, sampled, golds, grades, parts, strict=True)
    ]
    answers = sorted(gather(answers_here), key=lambda answer: (answer.index, answer.repeat))
    seconds = time.perf_counter() - started
    return summarise(answers, repeats=repeats, temperature=sampling.temperature, seconds=seconds)


@dataclass(frozen=True)
class _Sampled:
    """A completion before it is graded."""

    prompt: str  # the text that the model continued
    completion: Completion
    graded_text: str  # what rewards read: the completion, after the `<think>` that the prompt may end with
    length: int  # in tokens, of a conversation with all turns and results
    messages: str = ""  # of a conversation, as JSON
    environment_reward: float | None = None


@dataclass(frozen=True)
class Answer:
    """One graded completion: a row of the completions file, with these columns in this order.

    `index` numbers the test prompt and `repeat` its completion, both from 0. `prompt` is the text that the model
    continued, and `answer` is the gold answer. `completion_tokens` includes the end token, and `ended` is whether there
    is one. Of a conversation, `completion` is the text of the last turn, `completion_tokens` counts the policy's
    tokens, and `messages` has the messages of all turns as JSON. If no reward of the task says which answers are right,
    `rewards` has what the completion scores (`Task.reward_parts`), and columns of these names replace `answer_right`
    and `format_kept`.
    """

    index: int
    repeat: int
    prompt: str
    answer: str
    completion: str
    answer_right: bool
    format_kept: bool
    completion_tokens: int
    ended: bool
    messages: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation.

    `scores` has the names and numbers of a line of `evals.jsonl` (docs/metrics.md). `accuracy`, `format_accuracy` and
    `both_accuracy` are means over prompts and repeats. There is a `pass@k` for each power of two k from 2 to the number
    of repeats (pass@1 is `accuracy`). Each `<name>_se` is a standard error over prompts.
    `mean_completion_tokens` includes end tokens. `truncated_share` is the share of completions without an end token.
    `eval_seconds` is wall time. If no reward of the task says which answers are right, `reward` and `reward/<name>`
    replace the accuracies and pass@k. `answers` has the graded completions, sorted by prompt and repeat.
    """

    scores: Mapping[str, float]
    answers: Sequence[Answer] = field(default=(), repr=False)

    def columns(self) -> dict[str, list[object]]:
        """Return the graded completions as columns of a table, named as the fields of `Answer`."""
        dropped = {"rewards"}
        rewards = list(self.answers[0].rewards)
        if rewards:
            dropped |= {"answer_right", "format_kept"}
        if not any(answer.messages for answer in self.answers):
            dropped.add("messages")
        names = [column.name for column in fields(Answer) if column.name not in dropped]
        columns: dict[str, list[object]] = {name: [getattr(answer, name) for answer in self.answers] for name in names}
        for name in rewards:
            columns[name] = [answer.rewards[name] for answer in self.answers]
        return columns


def pass_at_k(repeats: int, right: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k completions is right.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n-c, k) / C(n, k) for c right ones (`right`) of n
    (`repeats`). Computed with integers and rounded once.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= right <= repeats or not 1 <= k <= repeats:
        raise ValueError(f"got k {k}, right {right}: expected 1 <= k <= {repeats} and 0 <= right <= {repeats}")
    ways = math.comb(repeats, k)
    return (ways - math.comb(repeats - right, k)) / ways


def summarise(answers: Sequence[Answer], *, repeats: int, temperature: float, seconds: float) -> Evaluation:
    """Return the means and standard errors of graded completions, `repeats` per prompt, sorted by prompt."""
    groups = [answers[start : start + repeats] for start in range(0, len(answers), repeats)]
    values: dict[str, list[float]] = {}  # of each prompt, by the name of a score
    passes: dict[str, list[float]] = {}
    if answers[0].rewards:  # nothing says which answers are right
        for name in answers[0].rewards:
            values[name] = [statistics.fmean(answer.rewards[name] for answer in group) for group in groups]
    else:
        right_counts = [sum(answer.answer_right for answer in group) for group in groups]
        values["accuracy"] = [right / repeats for right in right_counts]
        values["format_accuracy"] = [sum(answer.format_kept for answer in group) / repeats for group in groups]
        values["both_accuracy"] = [
            sum(answer.answer_right and answer.format_kept for answer in group) / repeats for group in groups
        ]
        for power in range(1, repeats.bit_length()):
            k = 2**power  # 2, 4, 8 and so on, up to `repeats`
            passes[f"pass@{k}"] = [pass_at_k(repeats, right, k) for right in right_counts]
    scores = _means_and_errors(values)
    scores |= {
        "mean_completion_tokens": statistics.fmean(answer.completion_tokens for answer in answers),
        "truncated_share": statistics.fmean(not answer.ended for answer in answers),
        "prompts": len(groups),
        "repeats": repeats,
        "temperature": temperature,
        "eval_seconds": seconds,
    }
    return Evaluation(scores | _means_and_errors(passes), answers)


def _means_and_errors(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each score over prompts, and its standard error (ddof 1) as `<name>_se`; NaN for one prompt.

    >>> _means_and_errors({"accuracy": [0.0, 1.0]})
    {'accuracy': 0.5, 'accuracy_se': 0.5}
    """
    scores: dict[str, float] = {}
    for name, of_prompts in values.items():
        count = len(of_prompts)
        scores[name] = statistics.fmean(of_prompts)
        scores[f"{name}_se"] = statistics.stdev(of_prompts) / math.sqrt(count) if count > 1 else math.nan
    return scores
