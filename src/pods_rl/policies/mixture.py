"""What the tiny policy is shown before RL: it meets right reasoning, but seldom enough to have much left to learn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ..tasks.arithmetic import Problem, write_completion, write_steps

# Steps that add ("+") or subtract ("-") a number ending in these digits are right this often; others are sure.
HARD_FACTS = dict.fromkeys(("+3", "+6", "+7", "+9", "-2", "-4", "-7", "-8"), 0.06)
# A wrong step is off by a few units or tens.
_SLIPS = (-20, -11, -10, -9, -3, -2, -1, 1, 2, 3, 9, 10, 11, 20)


@dataclass(frozen=True)
class Mixture:
    """How often a shown completion goes wrong, and how.

    A step is right with the probability that `hard_facts` gives for its sign and last digit, else with probability
    `sure`. A wrong step is a few units or tens off, and what follows works on from it. So a sum's success probability
    depends on which facts it needs, from nearly 0 to nearly 1, and no single habit repairs them all. A share
    `broken_form` leaves out a tag, or reasons not at all.
    """

    hard_facts: dict[str, float] = field(default_factory=lambda: dict(HARD_FACTS))
    sure: float = 0.97
    broken_form: float = 0.12

    def chance(self, term: int) -> float:
        """How likely the step that adds the signed `term` is right.

        >>> Mixture().chance(+37), Mixture().chance(-30)
        (0.06, 0.97)
        """
        return self.hard_facts.get(f"{'+' if term > 0 else '-'}{abs(term) % 10}", self.sure)

    def draw_totals(self, rng: random.Random, problem: Problem) -> list[int]:
        """Draw running totals of which some are wrong."""
        total, totals = problem.terms[0], []
        for term in problem.terms[1:]:
            slip = 0 if rng.random() < self.chance(term) else rng.choice(_SLIPS)
            total += term + slip
            totals.append(total)
        return totals

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


RIGHT = Mixture(hard_facts={}, sure=1.0, broken_form=0.0)
