"""Grade every payload with every built-in reward, as a program of its own: `python grading.py EVERY`.

Payloads are the completion, its final answer in each form an answer has, and the gold answer. Only every EVERY-th is
graded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pods_rl.rewards import REWARDS, VerifierPool, answers, verifier
from reliability.payloads import CODE

FORMS = ("{}", "<think>x</think><answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "<answer>\\boxed{{{}}}</answer>")
GOLDS = ("18", "x^2+1", r"\{1, 2\}", "B", "2H2 + O2 = 2H2O", "6*(5-1)", "1 2 3")


def main(every: int) -> None:
    # a worker that runs out of time is replaced, and its imports would come after the mark
    verifier.FIRST_LIMIT = 60.0
    pool = VerifierPool(size=1, limit=60.0)
    answers.default_pool = lambda: pool
    rewards = list(REWARDS.values())
    for reward in rewards:  # what is imported or started at first use
        if reward.reads == "text":
            for text, gold in (("<answer>2\\sqrt{2}</answer>", "\\sqrt{8}"), ("<answer>A 1 2</answer>", "B")):
                reward(text, gold)
    sys.audit("pods.mark")
    for reward in rewards:
        pairs = [pair for payload in CODE[::every] for pair in _pairs(payload)]
        if reward.reads == "tokens":
            reward.of_lengths([len(text) for text, _ in pairs], 64)
        else:
            reward.batch(*map(list, zip(*pairs, strict=True)))
    pairs = [(gold, payload) for payload in CODE[::every] for gold in ("x^2+1", payload + " ")]
    pool.verify(pairs + [(payload, gold) for gold, payload in pairs])  # past all that accuracy sees to itself
    print(json.dumps([reward.name for reward in rewards]))
    pool.close()


def _pairs(payload: str) -> list[tuple[str, str]]:
    given = [(form.format(payload), gold) for form in FORMS for gold in GOLDS]
    return [
        *given,
        *((f"<answer>{gold}</answer>", payload) for gold in GOLDS),
        (f"<answer>{payload} </answer>", payload),
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]))
