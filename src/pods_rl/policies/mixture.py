"""What the tiny policy is shown before RL: it meets right reasoning, but seldom enough to have much left to learn."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from ..tasks.arithmetic import Problem, write_completion, write_steps


@dataclass(frozen=True)
class Mixture:
    """How often a shown completion goes wrong, and how.

    A step is right with probability `sure`, or only `unsure` where its sum is one of the weak facts: a share
    `weak_share` of the pairs of last digits, for each sign. A wrong step is a few units or tens off, and what follows
    works on from it. So a sum's success probability depends on which facts it needs, from nearly 0 to nearly 1, and
    no single habit repairs them all. A share `broken_form` leaves out a tag or gives a bare answer.
    """

    sure: float = 0.96
    unsure: float = 0.2
    weak_share: float = 0.4
    broken_form: float = 0.12

    def knows(self, total: int, term: int) -> bool:
        """Whether adding the signed `term` to `total` needs no weak fact.

        >>> Mixture(weak_share=0.0).knows(7, 8), Mixture(weak_share=1.0).knows(7, 8)
        (True, False)
        """
        fact = f"{abs(total) % 10}{'+' if term > 0 else '-'}{abs(term) % 10}"
        return zlib.crc32(fact.encode()) % 1000 >= 1000 * self.weak_share

    def draw_totals(self, rng: random.Random, problem: Problem) -> list[int]:
        """Draw running totals of which some are wrong."""
        totals = [problem.terms[0]]
        for term in problem.terms[1:]:
            right = rng.random() < (self.sure if self.knows(totals[-1], term) else self.unsure)
            totals.append(totals[-1] + term + (0 if right else rng.choice(_SLIPS)))
        return totals[1:]

    def draw_completion(self, rng: random.Random, problem: Problem) -> str:
        """Draw a completion to show, with its mistakes."""
        totals = self.draw_totals(rng, problem)
        if rng.random() >= self.broken_form:
            return write_completion(problem, totals)
        steps, answer = write_steps(problem, totals), totals[-1]
        broken = (
            f"<think>{steps}</think>{answer}",
            f"<think>{steps}<answer>{answer}</answer>",
            f"{steps}\n<answer>{answer}</answer>",
            f"<answer>{answer + rng.choice(_SLIPS)}</answer>",
        )
        return rng.choice(broken)


_SLIPS = (-20, -11, -10, -9, -3, -2, -1, 1, 2, 3, 9, 10, 11, 20)
RIGHT = Mixture(sure=1.0, weak_share=0.0, broken_form=0.0)
