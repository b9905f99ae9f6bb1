r"""Decide whether an answer equals a gold answer: options, units, numbers and texts; the rest is left to `equality`.

Nothing here evaluates symbolic mathematics, so it takes microseconds and needs no process of its own.
"""

from __future__ import annotations

import re

from .amounts import read_amounts
from .bounds import split_bound
from .choices import LETTERS, has_label, read_label
from .codes import compare_codes
from .congruences import split_modulus, with_remainder
from .molecules import is_formula, is_word, without_subscripts
from .notation import plain, to_ascii
from .numerals import Number, read_number
from .parameters import split_parameter, with_letter
from .texts import same_items
from .units import counted_thing, same_thing, split_unit, with_per
from .words import WORDS_THAT_CHANGE_A_NUMBER, in_digits, may_change, read_number_in_words

Pair = tuple[str, str]
_DEEPEST = 24  # nested brackets: twice the depth of MATH's gold answers

_SINGLE = r"(?<![A-Za-z])(?:[A-DF-Za-df-z]|(?<![0-9.])[eE])"  # not the e of 1e-9
_SYMBOLIC = re.compile(
    r"[\\^_{}+*/=()\[\]|!<>]"
    rf"|(?:{_SINGLE}|[0-9])\s*[-:]\s*(?:[A-Za-z](?![A-Za-z])|[0-9])"  # a-b, 2:3; hyphenated words stay words
)
_LIST = re.compile(r"[0-9]\s*(?:[,;]|(?:and|or)\s)")  # 1, 2 or 6 and 8
_PRODUCT = re.compile(r"[-+]?[0-9.]*\s*(?:[A-Za-z]\s*){1,3}")  # -x, 2ab, mn
_IN_TEXT = re.compile(r"\$?\s*\\(?:text[a-z]*|mathrm|mbox)\s*\{[A-Za-z\s]+\}[\s.]*\$?")  # \text{odd}
_BULLETED = re.compile(r"^[ \t]*[-*•‣–−—][ \t]+(?=\S)", re.MULTILINE)  # - 3
_NEEDLESS_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_WORD_WITH_VOWEL = re.compile(r"(?<![A-Za-z\\])(?:(?=[A-Za-z]*[AEIOUYaeiouy])[A-Za-z]{3,}|[Nn]o|NO)(?![A-Za-z])")
_DIGITS_ALONE = re.compile(r"[0-9.,=\s]*")  # 18 = 17
_TIME = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)  # 3:30, 3 p.m.

_UPRIGHT = r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{\s*)?"
_LABEL = re.compile(rf"{_UPRIGHT}\(?([A-Za-z])\)?\s*\}}?")  # (B), \text{B}
_LABELLED = re.compile(  # (C) 12
    rf"{_UPRIGHT}(?:\((?=[A-Z]\))|(?=[A-P][.)]\s))([A-Z])[.)]\s*\}}?(?!\s*[\^_*/=+])"
    r"(?:\\[ ,;:]|~|\\quad|\s)*([^\s,;)}].*)",
    re.DOTALL,
)
_OPTION_TEXT = re.compile(  # C: 12; not of "the answer is (C) because (D) is wrong"
    r"(?<![A-Za-z])[A-P]\s*[:.)]\s*(?!(?:because|since|as|is|not|and|rather|instead)\b)(\S.*)", re.DOTALL
)
_IN_DELIMITERS = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$"  # $$x > 5$$
    r"|(?<!\\)\$([^$]+)(?<!\\)\$"  # $x > 5$
    r"|(?<!\\)\\\[(.+?)\\\]"  # \[x > 5\]
    r"|(?<!\\)\\\((.+?)\\\)",  # \(x > 5\)
    re.DOTALL,
)
_AROUND_A_FORMULA = frozenset(' \n.,;:!?*"')
_WORDS = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_CHANGING_A_FORMULA = (
    "no none but except excluding without unless impossible outside "
    "approximately about roughly nearly almost around close less more least most fewer greater smaller larger than "
    "above below under beyond within between up choose either or if modulo inverse opposite reciprocal complement "
    "conjugate derivative factor one two three four five six seven eight nine ten percent percentage pct per divided "
    "multiplied increased decreased added subtracted raised fourth fifth"
)
_WORDS_THAT_CHANGE_A_FORMULA = WORDS_THAT_CHANGE_A_NUMBER | frozenset(_CHANGING_A_FORMULA.split())
_TOO_LARGE = re.compile(
    r"[0-9][\s)}\]]{0,8}\^[\s({\[]{0,8}[0-9]+[\s)}\]]{0,8}\^[\s({\[]{0,8}[0-9]+(?:[0-9]|[\s)}\]]{0,8}\^)"  # 9^9^99
    r"|\^[\s({\[]{0,8}-?[0-9]{6}"  # 2^{100000}
    r"|[0-9]{5}[\s)}\]]{0,8}!"  # 99999!
    r"|!\s*\)?\s*!\s*\)?\s*!"  # ((9!)!)!
)


def decide(answer: str, gold: str) -> bool | Pair:
    r"""Return whether an answer equals a gold answer, or the pair (gold, answer) that `equal` must decide.

    Both are bare answers. One of more than `notation.MAX_LENGTH` characters is wrong.

    >>> decide("$18.00 a day", "18"), decide("17 or 18", "18"), decide(r"\textbf{(C)}\ 12", "12")
    (True, False, True)
    >>> decide(r"2\sqrt{2}", r"\sqrt{8}")
    ('\\sqrt{8}', '2\\sqrt{2}')
    """
    if not to_ascii(answer) or not to_ascii(gold):  # too long
        return False
    answer = with_per(in_digits(_without_bullets(answer)))
    gold = with_per(in_digits(_without_bullets(gold)))
    names_the_option = _compare_option(answer, gold)
    if names_the_option is not None:
        return names_the_option
    answer_option = _option(answer)
    gold_option = _option(gold)
    if answer_option or gold_option:
        return _compare_labelled(answer, gold, answer_option, gold_option)
    amounts = read_amounts(answer)
    gold_amounts = read_amounts(gold)
    if amounts and gold_amounts:
        return amounts == gold_amounts
    without_units = _without_units(answer, gold)
    if without_units is None:
        return False
    plain_answer, plain_gold = map(plain, without_units)
    verdict = _compare_kinds(plain_answer, plain_gold, gold)
    if verdict is not None:
        return verdict
    if _same_label(answer, gold):
        return True
    formula = _only_formula(answer)
    if formula:
        return decide(formula, gold)
    if _is_surely_different(plain_answer, plain_gold, gold):
        return False
    return plain_gold, plain_answer


def _compare_kinds(answer: str, gold: str, written_gold: str) -> bool | Pair | None:
    """Compare codes, answers with conditions, lists of words, times, numbers and texts; None if they are none of these.

    Both answers are `plain`.
    """
    is_same_code = compare_codes(answer, gold, written_gold)
    if is_same_code is not None:
        return is_same_code
    without_conditions = _without_conditions(answer, gold)
    if without_conditions is None:
        return False
    if without_conditions != (answer, gold):
        return decide(*without_conditions)
    if same_items(answer, gold):
        return True
    return _compare_values(answer, gold)


def _compare_values(plain_answer: str, plain_gold: str) -> bool | None:
    """Whether two times, numbers or texts are equal; None if they are not of a kind that is decided by its value."""
    gold_time = _TIME.fullmatch(plain_gold)
    if gold_time and (gold_time[2] or gold_time[3]):
        return _same_time(_TIME.fullmatch(plain_answer), gold_time)
    numbers = _numbers(plain_answer, plain_gold)
    if numbers:
        answer_number, gold_number = numbers
        return answer_number.equals(gold_number)
    if same_text(plain_answer, plain_gold) and not read_number(plain_gold):
        return True
    return None


def _is_surely_different(plain_answer: str, plain_gold: str, written_gold: str) -> bool:
    """Whether two expressions need not be given to `equal`, since the answer is of another kind or too large."""
    if is_formula(plain_gold) and (is_formula(plain_answer) or not plain_gold.isalpha()):
        return True
    is_mathematics = _SYMBOLIC.search(plain_answer) and not _DIGITS_ALONE.fullmatch(plain_answer)
    if not is_mathematics and (
        read_number(plain_gold) is not None or not _may_be_equal_words(plain_answer, plain_gold, written_gold)
    ):
        return True
    return is_too_large(plain_answer) and not is_too_large(plain_gold)


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


def _may_be_equal_words(answer: str, gold: str, written_gold: str) -> bool:
    """Whether an answer without signs of mathematics may equal a gold answer that has them, or a product of letters."""
    if _SYMBOLIC.search(gold) or _LIST.search(gold):
        return True
    if _IN_TEXT.fullmatch(written_gold.strip()) or not _PRODUCT.fullmatch(gold):
        return False
    if is_word(gold.lstrip("+-0123456789. ").rstrip()) or is_formula(gold):
        return False
    return set(re.findall("[A-Za-z]", answer)) == set(re.findall("[A-Za-z]", gold))


# -- options -----------------------------------------------------------------------------------------------------------


def _label(text: str) -> re.Match[str] | None:
    return _LABEL.fullmatch(text.strip(" $."))


def _option(text: str) -> re.Match[str] | None:
    return _LABELLED.fullmatch(text.strip(" $."))


def _compare_option(answer: str, gold: str) -> bool | Pair | None:
    r"""Compare an answer that names an option with a gold label, or a gold label and its value (`\textbf{(C)}\ 12`).

    None if the gold answer has no label, or the answer names no option in words or with its text.
    """
    gold_label = _label(gold)
    gold_option = _option(gold)
    labelled = gold_label or gold_option
    if labelled is None or labelled[1] not in LETTERS or _label(answer):
        return None
    letter = labelled[1]
    plain_answer = plain(answer)
    if gold_label:
        if not _option(answer) and not has_label(plain_answer):
            return None
        return read_label(plain_answer) == letter
    if gold_option is None or _option(answer) or not has_label(plain_answer):
        return None
    if read_label(plain_answer) != letter:
        return False
    text = _OPTION_TEXT.search(plain_answer)
    if text is None:
        return True
    return decide(text[1], gold_option[2])


def _compare_labelled(
    answer: str, gold: str, answer_option: re.Match[str] | None, gold_option: re.Match[str] | None
) -> bool | Pair:
    """Compare where one side or both are an option with its value: `(C) 12` is C, and 12."""
    if answer_option and gold_option:
        if answer_option[1] != gold_option[1]:
            return False
    else:
        option = answer_option or gold_option
        label = _label(gold if answer_option else answer)
        if option and label:
            return label[1].upper() == option[1]
    answer_value = answer_option[2] if answer_option else answer
    gold_value = gold_option[2] if gold_option else gold
    return decide(answer_value, gold_value)


def _same_label(answer: str, gold: str) -> bool:
    """Whether both are the label of the same choice; a bare letter is a variable, so that its case counts."""
    answer_label = _label(answer)
    gold_label = _label(gold)
    if not answer_label or not gold_label:
        return False
    if answer_label[1] == gold_label[1]:
        return True
    is_option = gold_label[1] in "ABCD" or len(gold.strip(" $.")) > 1 or "(" in answer
    return is_option and answer_label[1].upper() == gold_label[1]


# -- units, times and numbers ------------------------------------------------------------------------------------------


def _without_units(answer: str, gold: str) -> tuple[str, str] | None:
    """Return both answers without their units, or None if both have one and these differ; nothing is converted.

    So it is with the things that they count: eggs are not boxes.
    """
    answer_value, answer_unit = split_unit(answer)
    gold_value, gold_unit = split_unit(gold)
    if gold_unit and not answer_unit:
        answer_value, answer_unit = split_unit(answer, loose=True)
    elif answer_unit and not gold_unit:
        gold_value, gold_unit = split_unit(gold, loose=True)
    if answer_unit and gold_unit:
        units = {answer_unit, gold_unit}
        if len(units) > 1 and units not in ({"degree", "degreeF"}, {"degree", "degreeC"}):
            return None
        return answer_value, gold_value
    answer_thing = answer_unit or counted_thing(answer)
    gold_thing = gold_unit or counted_thing(gold)
    if answer_thing and gold_thing and not same_thing(answer_thing, gold_thing):
        return None
    return answer_value, gold_value


def _without_conditions(answer: str, gold: str) -> tuple[str, str] | None:
    """Return both answers without a modulus and the set of a parameter, or None if both have one and these differ."""
    answer_parameter = split_parameter(answer)
    gold_parameter = split_parameter(gold)
    if answer_parameter:
        answer = answer_parameter[0]
    if gold_parameter:
        gold = gold_parameter[0]
    if answer_parameter and gold_parameter:
        _, letter, values = answer_parameter
        _, gold_letter, gold_values = gold_parameter
        if values != gold_values:
            return None
        answer = with_letter(answer, letter, gold_letter)
    answer_modulus = split_modulus(answer)
    gold_modulus = split_modulus(gold)
    if answer_modulus and gold_modulus:
        if answer_modulus[1] != gold_modulus[1]:
            return None
        modulus = gold_modulus[1]
        answer = with_remainder(answer_modulus[0], modulus)
        gold = with_remainder(gold_modulus[0], modulus)
    elif answer_modulus:
        answer = answer_modulus[0]
    elif gold_modulus:
        gold = gold_modulus[0]
    if any(split(text) for split in (split_modulus, split_parameter) for text in (answer, gold)):
        return None  # two moduli
    return answer, gold


def _same_time(answer: re.Match[str] | None, gold: re.Match[str]) -> bool:
    if answer is None:
        return False
    if answer[3] and gold[3] and answer[3].lower() != gold[3].lower():  # a.m. and p.m.
        return False
    return int(answer[1]) == int(gold[1]) and (answer[2] or "00") == (gold[2] or "00")


def _numbers(answer: str, gold: str) -> tuple[Number, Number] | None:
    """Answer and gold answer as numbers; if one is bare or a bound, the other may have words around it ("6 cm")."""
    answer_number = read_number(answer)
    gold_number = read_number(gold)
    neither_is_bare = answer_number is None and gold_number is None
    if answer_number is None:
        answer_number = read_number_in_words(answer, asked_for=not neither_is_bare)
    if gold_number is None:
        gold_number = read_number_in_words(gold)
    if answer_number is None or gold_number is None:
        return None
    if neither_is_bare and not answer_number.bound and not gold_number.bound:
        return None
    return answer_number, gold_number


# -- texts and formulas ------------------------------------------------------------------------------------------------


def same_text(answer: str, gold: str) -> bool:
    """Whether two texts are the same but for spaces and the case of words; the case of a formula counts.

    >>> same_text("new york", "New York"), same_text("c1ccccc1", "C1CCCCC1"), same_text("cco", "CCO")
    (True, False, False)
    """
    if is_formula(gold):
        return without_subscripts(answer) == without_subscripts(gold)
    return _normal_text(answer) == _normal_text(gold)


def _normal_text(text: str) -> str:
    """Drop spaces and the case of words, which have a vowel; the case of a letter counts."""
    return _WORD_WITH_VOWEL.sub(lambda word: word[0].casefold(), _NEEDLESS_SPACE.sub("", text))


def _only_formula(answer: str) -> str | None:
    r"""Return the one formula of an answer in a sentence (`Therefore $x > 5$ is the solution.`), or None.

    None if a word around the formula may change it, and if there is more mathematics around it.
    """
    formulas = list(_IN_DELIMITERS.finditer(answer))
    if len(formulas) != 1:
        return None
    formula = formulas[0]
    before = answer[: formula.start()]
    after = answer[formula.end() :]
    words = _WORDS.findall(before + " " + after)
    if not words or not set(_WORDS.sub("", before + after)) <= _AROUND_A_FORMULA or before.rstrip().endswith(" of"):
        return None
    if may_change(words, _WORDS_THAT_CHANGE_A_FORMULA):
        return None
    around = split_bound(before, after)
    if around is None or around[0]:
        return None
    return formula[formula.lastindex or 0]


def is_too_large(text: str) -> bool:
    """Whether an answer is obviously too large or too deeply nested to evaluate; others have the time limit.

    >>> is_too_large("9^{9^{99}}"), is_too_large("2^{10}")
    (True, False)
    """
    depth = 0
    for bracket in re.findall(r"[(\[{]|[)\]}]", text):
        if bracket in "([{":
            depth += 1
        else:
            depth = max(0, depth - 1)
        if depth > _DEEPEST:
            return True
    return bool(_TOO_LARGE.search(text))
