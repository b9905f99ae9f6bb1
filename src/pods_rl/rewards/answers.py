"""Find the final answer in a text and grade it. Mathematics other than numbers goes to the verifier pool."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .choices import LETTERS, has_label, read_label
from .molecules import is_formula, is_word, without_subscripts
from .notation import plain, split_unit
from .numeric import (
    MAX_LENGTH,
    WORDS_THAT_CHANGE_A_NUMBER,
    Number,
    may_change,
    read_number,
    read_number_in_words,
)
from .thinking import after_thought
from .verifier import Pair, default_pool

MAX_DEPTH = 24  # nested brackets: twice the depth of MATH's gold answers

# An operator; a minus sign counts between digits or single letters only, so that hyphenated words stay words.
_SINGLE = r"(?<![A-Za-z])(?:[A-DF-Za-df-z]|(?<![0-9.])[eE])"  # not the e of 1e-9
_SYMBOLIC = re.compile(rf"[\\^_{{}}+*/=()\[\]|!<>]|(?:{_SINGLE}|[0-9])\s*[-:]\s*(?:[A-Za-z](?![A-Za-z])|[0-9])")
_LIST = re.compile(r"[0-9]\s*(?:[,;]|(?:and|or)\s)")  # 1, 2 or 6 and 8
_PRODUCT = re.compile(r"[-+]?[0-9.]*\s*(?:[A-Za-z]\s*){1,3}")  # -x, 2ab, mn
_IN_TEXT = re.compile(r"\$?\s*\\(?:text[a-z]*|mathrm|mbox)\s*\{[A-Za-z\s]+\}[\s.]*\$?")
_BULLETED = re.compile(r"^[ \t]*[-*•‣–−—][ \t]+(?=\S)", re.MULTILINE)
_NEEDLESS_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_WORD = re.compile(r"(?<![A-Za-z\\])(?:(?=[A-Za-z]*[AEIOUYaeiouy])[A-Za-z]{3,}|[Nn]o|NO)(?![A-Za-z])")
_NO_MATHEMATICS = re.compile(r"[0-9.,=\s]*")  # 18 = 17
_UPRIGHT = r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{\s*)?"
_LABEL = re.compile(rf"{_UPRIGHT}\(?([A-Za-z])\)?\s*\}}?")  # (B), \text{B}
_LABELLED = re.compile(  # (C) 12
    rf"{_UPRIGHT}(?:\((?=[A-Z]\))|(?=[A-H][.)]\s))([A-Z])[.)]\s*\}}?(?!\s*[\^_*/=+])"
    r"(?:\\[ ,;:]|~|\\quad|\s)*([^\s,;)}].*)",
    re.DOTALL,
)
_OPTION_TEXT = re.compile(  # C: 12; not of "the answer is (C) because (D) is wrong"
    r"(?<![A-Za-z])[A-J]\s*[:.)]\s*(?!(?:because|since|as|is|not|and|rather|instead)\b)(\S.*)", re.DOTALL
)
_TIME = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
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
_TOO_LARGE = re.compile(  # a tower of powers, a power or factorial of a long number, a factorial of factorials
    r"[0-9][\s)}\]]{0,8}\^[\s({\[]{0,8}[0-9]+[\s)}\]]{0,8}\^[\s({\[]{0,8}[0-9]+(?:[0-9]|[\s)}\]]{0,8}\^)"
    r"|\^[\s({\[]{0,8}[0-9]{6}|[0-9]{5}[\s)}\]]{0,8}!|!\s*\)?\s*!\s*\)?\s*!"
)


def accuracy(text: str, gold: str) -> float:
    """Return 1.0 if the final answer of `text` is `gold`, else 0.0.

    Source: arXiv 2504.13818, experiments: reward 1.0 for a right answer. Range {0.0, 1.0}.

    `extract_answer` finds the answer of the completion `text`; `gold` is the bare gold answer. Numbers are compared
    exactly (0.333 is not 1/3), then strings without styles and spacing. Other mathematics goes to a verifier process,
    which is killed at its time limit; the answer then scores 0.0. Numeric answers never start that process, and
    neither do answers that are obviously too large to evaluate, unless the gold answer is as large. An answer
    of more than `numeric.MAX_LENGTH` characters is right only if it equals the gold answer to the letter.

    >>> accuracy("<think>9*2</think><answer>$18.00 a day</answer>", "18")
    1.0
    >>> accuracy("<answer>17 or 18</answer>", "18")
    0.0
    """
    return accuracy_batch([text], [gold])[0]


def accuracy_batch(texts: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Score many completions as `accuracy` does; symbolic ones in parallel, equal ones once.

    Raises ValueError if the lengths differ.

    >>> accuracy_batch(["#### 4", "#### 5"], ["4", "4"])
    [1.0, 0.0]
    """
    verdicts = [_decide(text, gold) for text, gold in zip(texts, golds, strict=True)]
    pairs = list(dict.fromkeys(verdict for verdict in verdicts if isinstance(verdict, tuple)))
    verified = dict(zip(pairs, default_pool().verify(pairs), strict=True)) if pairs else {}
    return [float(verified[verdict] if isinstance(verdict, tuple) else verdict) for verdict in verdicts]


def _decide(text: str, gold: str) -> bool | Pair:
    """Grade without symbolic mathematics, or return the pair (gold, answer) that needs it."""
    stated, wanted = extract_answer(text), gold.strip()
    if stated is None or not wanted:
        return False
    if stated == wanted:
        return True
    if len(stated) > MAX_LENGTH or len(wanted) > MAX_LENGTH:
        return False
    return _compare(stated, extract_gold(wanted) or wanted)


def _compare(stated: str, wanted: str) -> bool | Pair:
    stated = _without_bullets(stated)
    wanted = _without_bullets(wanted)
    choice = _compare_choice(stated, wanted)
    if choice is not None:
        return choice
    labels = _LABELLED.fullmatch(stated.strip(" $.")), _LABELLED.fullmatch(wanted.strip(" $."))
    if any(labels):  # \textbf{(C)}\ 12 is C, and 12
        return _compare_labelled(stated, wanted, *labels)
    unitless = _without_units(stated, wanted)
    if unitless is None:
        return False
    answer, gold = map(plain, unitless)
    time, gold_time = _TIME.fullmatch(answer), _TIME.fullmatch(gold)
    if gold_time and (gold_time[2] or gold_time[3]):
        return _same_time(time, gold_time)
    numbers = _numbers(answer, gold)
    if numbers:
        return numbers[0].equals(numbers[1])
    number = read_number(gold)
    if (same_text(answer, gold) and not number) or _same_choice(stated, wanted):
        return True
    if formula := _formula(stated):
        return _compare(formula, wanted)
    if is_formula(gold) and (is_formula(answer) or not gold.isalpha()):
        return False
    symbolic: object = _SYMBOLIC.search(answer) and not _NO_MATHEMATICS.fullmatch(answer)
    if not number:
        product = not _IN_TEXT.fullmatch(wanted.strip()) and _may_be_same_product(answer, gold)
        symbolic = symbolic or product or _SYMBOLIC.search(gold) or _LIST.search(gold)
    if not symbolic or (_too_large(answer) and not _too_large(gold)):
        return False
    return gold, answer


def _without_bullets(text: str) -> str:
    """A list of several lines, each with a bullet, as a list; a dash before a single number is its sign.

    >>> _without_bullets("- 3\\n- 4"), _without_bullets("- 3")
    ('3, 4', '- 3')
    """
    if len(_BULLETED.findall(text)) < 2:
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    if all(_BULLETED.match(line) for line in lines):
        return ", ".join(_BULLETED.sub("", line).strip() for line in lines)
    return _BULLETED.sub("", text)


def _may_be_same_product(answer: str, gold: str) -> bool:
    """Whether a gold answer is a product of variables (`2ab`, `mn`) and the answer has the same letters."""
    if not _PRODUCT.fullmatch(gold) or is_word(gold.lstrip("+-0123456789. ").rstrip()) or is_formula(gold):
        return False
    return set(re.findall("[A-Za-z]", answer)) == set(re.findall("[A-Za-z]", gold))


def _compare_choice(stated: str, wanted: str) -> bool | Pair | None:
    r"""Compare an answer that names an option with a gold label, or a gold label and its value (`\textbf{(C)}\ 12`).

    None if the gold answer has no label, or the answer names no option in words or with its text.
    """
    gold_label = _LABEL.fullmatch(wanted.strip(" $."))
    gold_option = _LABELLED.fullmatch(wanted.strip(" $."))
    if gold_label:
        letter = gold_label[1]
    elif gold_option:
        letter = gold_option[1]
    else:
        return None
    if letter not in LETTERS or _LABEL.fullmatch(stated.strip(" $.")):
        return None
    answer = plain(stated)
    option = _LABELLED.fullmatch(stated.strip(" $."))
    if gold_label:
        return read_label(answer) == letter if option or has_label(answer) else None
    if option or not gold_option or not has_label(answer):
        return None
    if read_label(answer) != letter:
        return False
    text = _OPTION_TEXT.search(answer)
    return _compare(text[1], gold_option[2]) if text else True


def _compare_labelled(
    stated: str, wanted: str, mine: re.Match[str] | None, theirs: re.Match[str] | None
) -> bool | Pair:
    if mine and theirs:
        return mine[1] == theirs[1] and _compare(mine[2], theirs[2])
    labelled, other = (mine or theirs, wanted if mine else stated)
    if labelled and (letter := _LABEL.fullmatch(other.strip(" $."))):
        return letter[1].upper() == labelled[1]
    return _compare(mine[2] if mine else stated, theirs[2] if theirs else wanted)


def _without_units(stated: str, wanted: str) -> tuple[str, str] | None:
    """Return both answers without their units, or None if both have one and these differ; nothing is converted."""
    (answer, unit), (gold, gold_unit) = split_unit(stated), split_unit(wanted)
    if gold_unit and not unit:
        answer, unit = split_unit(stated, loose=True)
    elif unit and not gold_unit:
        gold, gold_unit = split_unit(wanted, loose=True)
    if unit == gold_unit or not (unit and gold_unit):
        return answer, gold
    return (answer, gold) if {unit, gold_unit} in ({"degree", "degreeF"}, {"degree", "degreeC"}) else None


def _same_time(mine: re.Match[str] | None, theirs: re.Match[str]) -> bool:
    if mine is None or (mine[3] and theirs[3] and mine[3].lower() != theirs[3].lower()):
        return False
    return [int(mine[1]), mine[2] or "00"] == [int(theirs[1]), theirs[2] or "00"]


def _too_large(text: str) -> bool:
    """Whether an answer is obviously too large or too deeply nested to evaluate; others have the time limit."""
    depth = deepest = 0
    for bracket in re.findall(r"[(\[{]|[)\]}]", text):
        depth = max(0, depth + (1 if bracket in "([{" else -1))
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or bool(_TOO_LARGE.search(text))


def _numbers(answer: str, gold: str) -> tuple[Number, Number] | None:
    """Answer and gold answer as numbers; if one is bare or a bound, the other may have words around it ("6 cm")."""
    number = read_number(answer)
    target = read_number(gold)
    neither_is_bare = number is None and target is None
    if number is None:
        number = read_number_in_words(answer, asked_for=not neither_is_bare)
    if target is None:
        target = read_number_in_words(gold)
    if number is None or target is None:
        return None
    if neither_is_bare and not (number.bound or target.bound):
        return None
    return number, target


def _formula(stated: str) -> str | None:
    r"""The one formula of an answer in a sentence (`Therefore $x > 5$ is the solution.`), or None.

    None if a word around the formula may change it, and if there is more mathematics around it.
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
    return next(filter(None, found[0].groups()))


def same_text(answer: str, gold: str) -> bool:
    """Whether two texts are the same but for spaces and the case of words; the case of a formula counts.

    >>> same_text("new york", "New York"), same_text("c1ccccc1", "C1CCCCC1"), same_text("cco", "CCO")
    (True, False, False)
    """
    if is_formula(gold):
        return without_subscripts(answer) == without_subscripts(gold)
    return _key(answer) == _key(gold)


def _key(text: str) -> str:
    """An answer without spaces and the case of its words (they have a vowel); the case of a letter counts."""
    return _WORD.sub(lambda word: word[0].casefold(), _NEEDLESS_SPACE.sub("", text))


def _same_choice(answer: str, gold: str) -> bool:
    """Whether both are the label of the same choice; a bare letter is a variable, so that its case counts."""
    letters = [_LABEL.fullmatch(text.strip(" $.")) for text in (answer, gold)]
    if not all(letters):
        return False
    mine, theirs = (letter[1] for letter in letters if letter)
    return mine == theirs or (len(gold.strip(" $.")) > 1 and mine.upper() == theirs)


# -- extraction --------------------------------------------------------------------------------------------------------

MARKER = "####"
MAX_BETWEEN = 60  # characters between two boxes that are one answer
MAX_FORMS = 8  # in which one value is written
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{"
_AND = (
    r"(?:(?:and|or)(?: maybe| perhaps| possibly| also)?|[&/|]|\\(?:land|lor|wedge|vee)(?![a-z])"
    rf"|{_TEXT}[^{{}}0-9]{{0,30}}?(?:,|(?<![A-Za-z])(?:and|or))\s*\}})"
)
_SIGNS = r"(?:[\s$~*]|\\[,;:! ]|\\\\(?![A-Za-z])|\\[()\[\]]|\\q?quad)*"
_NAME = r"[A-Za-z](?:_\{?[0-9a-z]\}?)?\s*=\s*"
_BETWEEN = re.compile(  # 1 and 2; 1 papers and 2 bins; x = 1 and y = 2
    rf"\}}?{_SIGNS}(?:(?:[A-Za-z]+ ){{0,2}}{_AND}|[,;]{_SIGNS}{_AND}?)?{_SIGNS}(?:{_NAME})?\{{?"
)


def extract_answer(text: str) -> str | None:
    r"""Return the final answer of a text, or None if there is none.

    Only what follows the last `</think>` counts, and a text that ends within a thought has no answer.
    Searched in this order: the last complete `<answer>...</answer>`; the last balanced `\boxed{...}` or
    `\fbox{...}`; what follows the last `####` on its line. Within answer tags, a box or a marker is unwrapped too.
    Boxes with nothing but commas, `and`, `or` or two words such as a unit between them are one answer, a list. An
    empty answer is None, and empty answer tags are not replaced by a box elsewhere.

    The time taken is linear in the length of the text. No evaluation of any kind.

    >>> extract_answer("<think>9*2</think><answer>18</answer>")
    '18'
    >>> extract_answer(r"So it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"\boxed{-1} and $\boxed{2}$.")
    '-1, 2'
    >>> extract_answer("She makes 9 * 2 = 18.\n#### 18")
    '18'
    >>> extract_answer("eighteen") is None, extract_answer(r"<think>so \boxed{18}") is None
    (True, True)
    """
    text = after_thought(text) or ""
    tagged = _last_tagged(text)
    if tagged is None:
        return _unwrap(text)
    return _unwrap(tagged) or tagged.strip() or None


def extract_gold(text: str) -> str | None:
    """Return the gold answer in a data set's answer column, or None if it is empty.

    The column is read like a completion (`extract_answer`). A text without any mark is the answer itself.

    >>> extract_gold("9*2 = <<9*2=18>>18\\n#### 1,800"), extract_gold(" 42 ")
    ('1,800', '42')
    """
    answer = extract_answer(text)
    if answer is not None or MARKER in text:
        return answer
    return (after_thought(text) or "").strip() or None


def _unwrap(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    _, marked, following = text.rpartition(MARKER)
    return (marked and following.lstrip().partition("\n")[0].strip()) or None


def _last_tagged(text: str) -> str | None:
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.find("</answer>", start)]


def _last_boxed(text: str) -> str | None:
    if not _BOX.search(text):
        return None
    openers: list[tuple[int, int] | None] = []  # of each open box, where it and its content start; None: other braces
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            if openers and (opener := openers.pop()):
                boxes.append((*opener, match.start()))
        elif token == "{":
            openers.append(None)
        elif len(token) > 2:  # a box; an escaped character is two long
            openers.append(match.span())
    return _joined(text, sorted(boxes)) if boxes else None


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> str:
    """The content of the last box, after those of the boxes before it that belong to the same answer."""
    found: list[str] = []
    following = len(text)
    for opening, start, end in reversed(boxes):
        far = not 0 < following - end <= MAX_BETWEEN
        if found and (far or not _BETWEEN.fullmatch(text, end + 1, following)):
            break
        found.append(text[start:end].strip())
        following = opening
    found = [content for content in reversed(found) if content]
    forms: set[object] = set(found)
    if len(forms) <= MAX_FORMS:
        forms = {((number := read_number(plain(form))) and number.fraction) or form for form in set(found)}
    return found[-1] if len(forms) == 1 else ", ".join(found)
