"""What two arms differ in, in the words of a reader, and which pairs and families of arms show one thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .arms import Arm, rollouts_of
from .comparable import NO_MATTER, OWN_TO_A_RUN
from .text import finite, in_order, plain

AXES = ("n", "m", "rule", "advantages")
"""What an ablation varies."""

CHEAPER_STEP = "the cheaper step"
SELECTION = "selection"

_TRL_STEP = "TRL’s own step"  # the cheaper step, seen from the other arm
_NO_SELECTION = "no selection"

# the settings of the cheaper step, each with the value that TRL's own step has
_SKIPS = "skip_zero_advantage_steps"
_STEP = {"exact_trl": True, "prefix_tree": False, _SKIPS: False}
_NAMES = {
    "n": "the rollouts generated (n)",
    "m": "the rollouts kept (m)",
    "rule": "the selection rule",
    "advantages": "the advantages",
    "prompts": "the prompts per step",
    "learning_rate": "the learning rate",
}


_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")

Settings = Mapping[str, Any]


class Contrast(NamedTuple):
    """An arm, the arm that it is compared with, and what the comparison shows."""

    arm: Arm
    rival: Arm
    shows: str


def things(arm: Arm, rival: Arm) -> tuple[str, ...] | None:
    """Return what an arm has that its rival has not, each in words; None if the recipe of one is unknown.

    Settings that make one thing together have one name. The settings of the cheaper step are ``the cheaper step``. More
    rollouts than are kept, against an arm that keeps all, are ``selection``. Batches count in prompts (`settings_of`).

    >>> grpo = Arm("grpo", "grpo", None, {"num_generations": 4, "exact_trl": True})
    >>> pods = Arm("pods", "pods", None, {"num_generations": 4, "num_rollouts": 16, "exact_trl": False})
    >>> things(pods, grpo)
    ('the cheaper step', 'selection')
    """
    ours = settings_of(arm.config)
    theirs = settings_of(rival.config)
    if not ours or not theirs:
        return None
    keys = differences(ours, theirs)
    names = []
    if keys & _STEP.keys():
        takes_trl_step = _own_settings(ours) < _own_settings(theirs)
        names.append(_TRL_STEP if takes_trl_step else CHEAPER_STEP)
    names += _selection_names(ours, theirs, keys)
    for key in sorted(keys - _STEP.keys() - {*AXES}):
        names.append(_NAMES.get(key) or plain(key))
    return tuple(names)


def _own_settings(settings: Settings) -> int:
    """Return how many settings of the step are not TRL's."""
    count = 0
    for key, value in _STEP.items():
        if settings.get(key) != str(value).lower():  # settings are JSON
            count += 1
    return count


def _selection_names(ours: Settings, theirs: Settings, keys: set[str]) -> list[str]:
    """Return what differs in the rollouts of a prompt."""
    sizes = keys & {"n", "m"}
    if is_plain(ours) and is_plain(theirs):
        return ["the group size"] if sizes else []
    if is_plain(ours) or is_plain(theirs):
        names = [_NO_SELECTION if is_plain(ours) else SELECTION]
        if len(sizes) == 2:
            names.append("the group size")
        return names
    return [_NAMES[key] for key in AXES if key in keys]


def contrasts(arms: Sequence[Arm], base: Arm, subject: Arm, shows: Mapping[str, str]) -> list[Contrast]:
    """Return for each arm the pair that shows one thing, those with the baseline first; arms without one are skipped.

    Args:
        arms: the arms that may be compared, the baseline among them.
        base: the arm that the others are measured against. It is the rival in its pairs.
        subject: the arm that the experiment is about, which comes first.
        shows: what an arm shows, by its name, as the experiment declares it. The arm is compared with the one that
            differs in that, and in the fewest other things.
    """
    ordered = sorted((arm for arm in arms if arm is not base), key=lambda arm: arm is not subject)
    found = []
    for arm in ordered:
        rivals = [base, *(rival for rival in ordered if rival is not arm)]
        if arm.name in shows:
            found.append(_declared(arm, rivals, shows[arm.name]))
        else:
            found += _first_of_one_thing(arm, rivals, base, subject)
    unique: list[Contrast] = []
    for contrast in found:
        if not any({contrast.arm, contrast.rival} == {other.arm, other.rival} for other in unique):
            unique.append(contrast)
    return sorted(unique, key=lambda contrast: contrast.rival is not base)


def _declared(arm: Arm, rivals: Sequence[Arm], shown: str) -> Contrast:
    """Return the pair of an arm that declares what it shows: with the baseline if nothing else fits better."""

    def distance(rival: Arm) -> tuple[bool, int]:
        names = things(arm, rival) or ()
        return shown not in names, len(names)

    return Contrast(arm, min(rivals, key=distance), shown)


def _first_of_one_thing(arm: Arm, rivals: Iterable[Arm], base: Arm, subject: Arm) -> list[Contrast]:
    """Return the pair with the first rival that differs in one thing; none if there is no such rival."""
    for rival in rivals:
        names = things(arm, rival)
        if names is None or len(names) != 1:
            continue
        if rival is base or names[0] in (CHEAPER_STEP, SELECTION):
            return [Contrast(arm, rival, names[0])]
        if names[0] in (_TRL_STEP, _NO_SELECTION):
            continue  # the pair of the other arm, which has the thing, says this
        if rival is subject:
            return [Contrast(subject, arm, names[0])]
        return [Contrast(arm, rival, names[0])]
    return []


# ------------------------------------------------------------------------------------------ settings and families


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what an arm learns; empty if n or m is unknown.

    Args:
        config: a resolved recipe, or the columns of a CSV.

    >>> settings_of({"num_generations": 16, "rule": "random", "seed": 3})
    {'n': 16, 'm': 16, 'rule': 'random', 'advantages': ''}
    """
    n, m = rollouts_of(config)
    if not n or not m:
        return {}
    skipped = OWN_TO_A_RUN | NO_MATTER | {"num_rollouts", "num_generations", *AXES, *_ROWS}
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key not in skipped and value is not None:
            settings[str(key)] = in_order(value)
    rows = finite(config.get("per_device_train_batch_size"))
    micro_batches = finite(config.get("gradient_accumulation_steps")) or 1
    if rows:
        # A batch of as many prompts has more rows with a larger m, so batches are compared by their prompts.
        settings["prompts"] = rows * micro_batches / m
    if finite(config.get("steps_per_generation")) == micro_batches:
        # what TRL derives from the batch, as runs of a script write it
        settings.pop("steps_per_generation")
        settings.pop("generation_batch_size", None)
    settings["n"] = n
    settings["m"] = m
    settings["rule"] = str(config.get("rule") or "")
    settings["advantages"] = str(config.get("advantages") or "")
    return settings


def is_plain(settings: Settings) -> bool:
    """Whether an arm is plain GRPO: it keeps all it generates, so rule and advantages change nothing."""
    return bool(settings["n"] == settings["m"])


def differences(ours: Settings, theirs: Settings) -> set[str]:
    """Return the settings in which two arms differ."""
    keys = {*ours, *theirs}
    if is_plain(ours) or is_plain(theirs):
        keys -= {"rule", "advantages"}
    if _skips_by_default(ours) and _skips_by_default(theirs):
        keys.discard(_SKIPS)  # it follows from n and m, and older runs of scripts wrote it as a setting
    return {key for key in keys if ours.get(key) != theirs.get(key)}


def _skips_by_default(settings: Settings) -> bool:
    """Whether an arm skips steps without a gradient as it does if the setting is not given: if it drops rollouts."""
    return settings.get(_SKIPS) in (None, in_order(not is_plain(settings)))


def most_varied(arms: Sequence[Arm]) -> Arm | None:
    """Return the arm from which most others differ in n, m, the rule or the advantages alone; None if none does.

    Of several such arms, it is one that drops rollouts if there is one, and the first of those. Two arms alone do not
    vary one of them.
    """
    settings = {arm: settings_of(arm.config) for arm in arms}
    known = [arm for arm in arms if settings[arm]]
    if not known or len(arms) == 2:
        return None

    def varied(arm: Arm) -> int:
        all_differences = [differences(settings[arm], settings[other]) for other in known]
        return sum(len(keys) == 1 and keys <= {*AXES} for keys in all_differences)

    found = max(known, key=lambda arm: (varied(arm), not is_plain(settings[arm])))
    return found if varied(found) else None
