"""Is the final answer right? Numbers and strings are compared here; other mathematics goes to the verifier pool."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from functools import lru_cache

from .expressions import is_too_complex
from .extract import extract_answer, extract_gold
from .notation import plain, unit
from .numeric import (
    MAX_LENGTH,
    WORDS_THAT_CHANGE_A_NUMBER,
    Number,
    may_change,
    read_decimal_comma,
    read_number,
    read_number_in_words,
)
from .sandbox.pool import FreshPool
from .sandbox.processes import CAN_FORK, Reply
from .sandbox.serve import Work, bar_process

# An operator; a minus sign counts between digits or single letters only, so that hyphenated words stay words.
_SINGLE = r"(?<![A-Za-z])(?:[A-DF-Za-df-z]|(?<![0-9.])[eE])"  # not the e of 1e-9
_SYMBOLIC = re.compile(rf"[\\^_{{}}+*/=()\[\]|!<>]|(?:{_SINGLE}|[0-9])\s*[-:]\s*(?:[A-Za-z](?![A-Za-z])|[0-9])")
_LIST_OR_TERM = re.compile(  # 1, 2 or 6 and 8 or 0.5x
    r"[0-9]\s*(?:[,;]|(?:and|or)\s)|(?<![A-Za-z0-9.])[0-9.]+[A-Za-z](?![A-Za-z])"
)
_NEEDLESS_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_WORD = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]{3,}|[Nn]o)(?![A-Za-z])")
_UNIT = re.compile(r"(?<=[0-9])\s*[A-Za-z]+(?:\s*/\s*[A-Za-z]+)?(?:\s*\^\s*\{?[23]\}?)?$")  # dropped if both have it
_NO_MATHEMATICS = re.compile(r"[0-9.,=\s]*")  # 18 = 17
_CHOICE = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\(?([A-Za-z])\)?\}?")  # (B), \text{B}
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|(?<!\\)\\\[(.+?)\\\]|(?<!\\)\\\((.+?)\\\)", re.DOTALL
)
_AROUND = frozenset(' \n.,;:!?*"')
_WORDS = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_CHANGING = (
    "no none but except excluding without unless impossible outside "
    "approximately about roughly nearly almost around close less more least most fewer greater smaller larger than "
    "above below under beyond within between up choose either or if modulo inverse opposite reciprocal complement "
    "conjugate derivative factor one two three four five six seven eight nine ten percent percentage pct per divided "
    "multiplied increased decreased added subtracted raised fourth fifth"
)
_WORDS_THAT_CHANGE_A_FORMULA = WORDS_THAT_CHANGE_A_NUMBER | frozenset(_CHANGING.split())


def accuracy(text: str, gold: str) -> float:
    """Give 1.0 if the final answer of `text` is `gold`, else 0.0.

    Source: arXiv 2504.13818, experiments: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `extract_answer` finds the answer of the completion `text`; `gold` is the bare gold answer. Numbers are compared
    exactly (0.333 is not 1/3), then strings without styles and spacing. Other mathematics goes to a verifier process,
    which is killed at its time limit; the answer then scores 0.0. Numeric answers never start that process, and
    neither do answers that are too large to evaluate (`is_too_complex`), unless the gold answer is as large. An answer
    of more than `numeric.MAX_LENGTH` characters is right only if it equals the gold answer to the letter.

    >>> accuracy("<think>9*2</think><answer>$18.00 a day</answer>", "18")
    1.0
    >>> accuracy("<answer>17 or 18</answer>", "18")
    0.0
    """
    return accuracy_batch([text], [gold])[0]


def accuracy_batch(texts: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Score many completions as `accuracy` does; symbolic ones side by side, equal ones once.

    Raises ValueError where the lengths differ.

    >>> accuracy_batch(["#### 4", "#### 5"], ["4", "4"])
    [1.0, 0.0]
    """
    if len(texts) != len(golds):
        raise ValueError(f"got {len(texts)} texts and {len(golds)} gold answers: give one gold answer per text")
    verdicts = [_decide(text, gold) for text, gold in zip(texts, golds, strict=True)]
    pairs = list(dict.fromkeys(verdict for verdict in verdicts if isinstance(verdict, tuple)))
    verified = dict(zip(pairs, default_pool().verify(pairs), strict=True)) if pairs else {}
    return [float(verified[verdict] if isinstance(verdict, tuple) else verdict) for verdict in verdicts]


def _decide(text: str, gold: str) -> bool | Pair:
    """Decide without mathematics, or return the pair (gold, answer) that needs it."""
    stated, wanted = extract_answer(text), gold.strip()
    if stated is None or not wanted:
        return False
    if stated == wanted:
        return True
    if len(stated) > MAX_LENGTH or len(wanted) > MAX_LENGTH:
        return False
    wanted = extract_gold(wanted) or wanted
    answer, gold = plain(stated), plain(wanted)
    if (stated_unit := unit(stated)) and (wanted_unit := unit(wanted)):
        if stated_unit != wanted_unit:
            return False
        answer, gold = _UNIT.sub("", answer), _UNIT.sub("", gold)
    numbers = _numbers(answer, gold)
    if numbers:
        return numbers[0].equals(numbers[1])
    if _key(answer) == _key(gold) or _same_choice(stated, wanted):
        return True
    if formula := _formula(stated):
        answer = formula
        if _key(answer) == _key(gold):
            return True
    # Mathematics decides only where there is some: in the answer to a number, else in the gold answer.
    if read_number(gold):
        symbolic = bool(_SYMBOLIC.search(answer) and not _NO_MATHEMATICS.fullmatch(answer))
    else:
        symbolic = bool(_SYMBOLIC.search(gold) or _LIST_OR_TERM.search(gold))
        symbolic = symbolic or (len(gold) == 1 and bool(_SYMBOLIC.search(answer)))  # the gold answer i
    if not symbolic or (is_too_complex(answer) and not is_too_complex(gold)):
        return False
    return gold, answer


def _numbers(answer: str, gold: str) -> tuple[Number, Number] | None:
    """Answer and gold answer as numbers; where one is a bare number, the other may have words around it ("6 cm")."""
    number, target = read_number(answer), read_number(gold)
    if target:
        number = number or read_number_in_words(answer) or read_decimal_comma(answer)
    elif number:
        target = read_number_in_words(gold) or read_decimal_comma(gold)
    return (number, target) if number and target else None


def _formula(stated: str) -> str | None:
    r"""The one formula of an answer in a sentence (`Therefore $x > 5$ is the solution.`), or None.

    None where a word around the formula may change it, where there is more mathematics around it, and where it is a
    number: `read_number_in_words` reads these.
    """
    found = list(_FORMULA.finditer(stated))
    if len(found) != 1:
        return None
    before, after = stated[: found[0].start()], stated[found[0].end() :]
    words = _WORDS.findall(before + " " + after)
    if not words or not set(_WORDS.sub("", before + after)) <= _AROUND or before.rstrip().endswith(" of"):
        return None
    if may_change(words, _WORDS_THAT_CHANGE_A_FORMULA):
        return None
    formula = plain(next(filter(None, found[0].groups())))
    return None if read_number(formula) else formula


def _key(text: str) -> str:
    """An answer without spaces and the case of its words; the case of a letter counts."""
    return _WORD.sub(lambda word: word[0].casefold(), _NEEDLESS_SPACE.sub("", text))


def _same_choice(answer: str, gold: str) -> bool:
    """Whether both are the label of the same choice; a bare letter is a variable, so that its case counts."""
    letters = [_CHOICE.fullmatch(text.strip(" $.")) for text in (answer, gold)]
    if not all(letters):
        return False
    mine, theirs = (letter[1] for letter in letters if letter)
    label = len(gold.strip(" $.")) > 1 and theirs.isupper()
    return mine == theirs or (label and mine.upper() == theirs)


DEFAULT_LIMIT = 5.0  # seconds an answer: math-verify's own default (its parsing_timeout and timeout_seconds)
FIRST_LIMIT = 0.25  # seconds an answer gets at first: 500 gold answers of MATH-500 took 0.15 at most, most 0.002
BATCH_SECONDS = 4.0  # what a batch spends on a second try of those that took longer
PATIENCE = 10.0  # wall seconds for a second of work, on a busy machine, before a process is taken for dead
MEMORY_BYTES = 3 << 30  # a tower of powers fills any memory within seconds; past this the process ends

Pair = tuple[str, str]


class VerifierPool(FreshPool):
    """Decide whether pairs of expressions are equal, `size` at a time, `limit` seconds at most each.

    Seconds are of processor time, so that a busy machine makes no honest answer fail (on Windows, which has no such
    limit, of wall time). Every answer of a batch gets `FIRST_LIMIT` seconds; those that took longer are tried again
    with equal shares of `BATCH_SECONDS` a process, up to `limit`. So a few slow answers get all the time they need, and
    a batch in which each one hangs ends after `len(batch) / size * FIRST_LIMIT` seconds.

    `timeouts` counts the answers that took too long, `crashes` those whose process ended by itself (out of memory,
    recursion); both score False.
    """

    def __init__(self, size: int | None = None, limit: float = DEFAULT_LIMIT) -> None:
        super().__init__(size, limit, ["pods_rl.rewards.verifier:verification"], runs_user_code=False)
        self.timeouts = 0
        self.crashes = 0
        self._lock = threading.Lock()

    def verify(self, pairs: Sequence[Pair]) -> list[bool]:
        """Say of each (gold, answer) whether the two are mathematically equal, in order.

        Raises RuntimeError where a process cannot start: no score is made up for lack of a verifier.

        >>> pool = VerifierPool(size=1)
        >>> pool.verify([(r"\\\\sqrt{8}", r"2\\\\sqrt{2}"), ("x+1", "x")])
        [True, False]
        >>> pool.close()
        """
        first = min(self.limit, FIRST_LIMIT)
        replies = self._verify(pairs, first)
        late = [i for i, reply in enumerate(replies) if reply.kind == "timeout"]
        share = min(self.limit, BATCH_SECONDS * self.size / max(1, len(late)))
        if share > first:
            for i, reply in zip(late, self._verify([pairs[i] for i in late], share), strict=True):
                replies[i] = reply
        with self._lock:
            self.timeouts += sum(reply.kind == "timeout" for reply in replies)
            self.crashes += sum(reply.kind in ("crash", "garbled") for reply in replies)
        return [reply == Reply("gave", True) for reply in replies]

    def start_error(self, reply: Reply, code: int | None) -> Exception:
        return RuntimeError("the answer verifier did not start: check that `python -c 'import math_verify'` works")

    def _verify(self, pairs: Sequence[Pair], limit: float) -> list[Reply]:
        # A system that cannot fork has no limit of processor time.
        return self.ask(pairs, limit, limit * PATIENCE if CAN_FORK else limit)


def verification() -> Work:
    """What a verifier process does; it imports and builds what the first answers need, outside their time limits."""
    logging.disable(logging.CRITICAL)
    for pair in ((r"( 3, \frac{\pi}{2} )", r"(3, \pi/2)"), ("x^2-1", "(x+1)(x-1)"), ("x<3", r"(-\infty, 3)")):
        _equal(pair)
    _limit_memory()
    return Work(_equal, prepare=bar_process)


def _equal(pair: Pair) -> bool:
    from .mathematics import equal  # here, since only verifier processes load SymPy

    try:
        return equal(*pair)
    except MemoryError:
        os._exit(1)  # nothing allocated here can be trusted any more: a fresh process takes over
    except Exception:
        return False  # what cannot be parsed or compared is not right


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def default_pool() -> VerifierPool:
    """Return this process's own pool, made on first use (a forked child makes its own).

    >>> default_pool() is default_pool()
    True
    """
    return _pool_of(os.getpid())


@lru_cache
def _pool_of(owner: int) -> VerifierPool:
    return VerifierPool()


def verifier_losses() -> tuple[int, int]:
    """Return how many answers this process's own pool has lost so far: timeouts and crashes.

    >>> verifier_losses()[0] >= 0
    True
    """
    pool = default_pool()
    return pool.timeouts, pool.crashes
