"""What an evaluation measures, from graded completions: means, standard errors, pass@k. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One graded completion: a row of the completions file, with these columns in this order.

    `index` numbers the test prompt, `repeat` its completion, both from 0; `prompt` is the text the model continued,
    `answer` the gold answer; `completion_tokens` counts the end token, `ended` says whether there was one.
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


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation measured.

    `accuracy`, `format_accuracy` and `both_accuracy` are means over prompts and repeats, each `_se` a standard error
    over prompts; `mean_completion_tokens` counts the end token, `truncated_share` is the share of completions without
    one; `eval_seconds` is wall time. `pass_at` maps k > 1 to pass@k and its standard error (pass@1 is `accuracy`).
    `answers` are the graded completions, by prompt and repeat.
    """

    accuracy: float
    accuracy_se: float
    format_accuracy: float
    both_accuracy: float
    mean_completion_tokens: float
    truncated_share: float
    prompts: int
    repeats: int
    temperature: float
    eval_seconds: float
    format_accuracy_se: float = math.nan
    both_accuracy_se: float = math.nan
    pass_at: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    answers: Sequence[Answer] = field(default=(), repr=False)

    def row(self) -> dict[str, Any]:
        """Return a line of `evals.jsonl`: pass@k as `pass@2` and `pass@2_se`, without the completions."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pass_at", "answers")}
        for k, (value, error) in self.pass_at.items():
            row |= {f"pass@{k}": value, f"pass@{k}_se": error}
        return row

    def columns(self) -> dict[str, list[Any]]:
        """Return the graded completions as columns of a table, named as the fields of `Answer`."""
        return {f.name: [getattr(answer, f.name) for answer in self.answers] for f in fields(Answer)}


def pass_at_k(repeats: int, right: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k completions is right.

    Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n-c, k) / C(n, k) for c right ones (`right`) of n
    (`repeats`), in whole numbers, rounded once. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= right <= repeats or not 1 <= k <= repeats:
        raise ValueError(
            f"pass@{k} of {right} right in {repeats}: expected 0 <= right <= repeats and 1 <= k <= repeats"
        )
    ways = math.comb(repeats, k)
    return (ways - math.comb(repeats - right, k)) / ways


def powers_of_two(most: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... up to `most`.

    >>> powers_of_two(5)
    [1, 2, 4]
    """
    return [2**i for i in range(most.bit_length())]


def summarise(answers: Sequence[Answer], *, repeats: int, temperature: float, seconds: float) -> Evaluation:
    """Return the means and standard errors of graded completions, `repeats` per prompt, sorted by prompt."""
    prompts = len(answers) // repeats
    groups = [answers[i * repeats : (i + 1) * repeats] for i in range(prompts)]
    right = [sum(answer.answer_right for answer in group) for group in groups]
    accuracy, accuracy_se = mean_and_error([count / repeats for count in right])
    formed = mean_and_error([_share([a.format_kept for a in group]) for group in groups])
    both = mean_and_error([_share([a.answer_right and a.format_kept for a in group]) for group in groups])
    return Evaluation(
        accuracy=accuracy,
        accuracy_se=accuracy_se,
        format_accuracy=formed[0],
        both_accuracy=both[0],
        mean_completion_tokens=_share([answer.completion_tokens for answer in answers]),
        truncated_share=_share([not answer.ended for answer in answers]),
        prompts=prompts,
        repeats=repeats,
        temperature=temperature,
        eval_seconds=seconds,
        format_accuracy_se=formed[1],
        both_accuracy_se=both[1],
        pass_at={
            k: mean_and_error([pass_at_k(repeats, count, k) for count in right]) for k in powers_of_two(repeats)[1:]
        },
        answers=answers,
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over prompts and its standard error (ddof 1), which is NaN for a single prompt.

    >>> mean_and_error([0.0, 1.0])
    (0.5, 0.5)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _share(values: Sequence[float | bool]) -> float:
    return sum(map(float, values)) / len(values)
