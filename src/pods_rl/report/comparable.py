"""Which arms may be compared, and what a reader must know about a comparison.

Two kinds of differences:

- **Refused.** The scores measure different things: another task, other questions, another version of the task or of its
  grader, or other contents of the files, modules and policies that both recipes name. Such arms are shown, and not
  compared.
- **Noted.** The scores measure the same, but something else than the method differs: the policy, the form of the
  prompts, how evaluations sample, the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runs import Run
from .arms import Arm
from .pooling import as_text, contents_of, task_of
from .text import finite, plain

# keys of a recipe that choose the questions of an evaluation and their answers
_QUESTIONS = (
    "task",
    "task_difficulty",
    "task_options",
    "task_test_size",
    "task_seed",
    "dataset_name",
    "dataset_config",
    "dataset_test_name",
    "question_column",
    "answer_column",
)
_PROMPTS = ("prompt_style", "system_prompt")  # they are part of a task's version
_ROWS = "prompts"  # the key of the hashes of a task's rows; all other contents are of keys of a recipe
_SHAPE_ROWS = (*_PROMPTS, "task_rewards")  # keys that decide how rows are written
_CHOOSE_TRAINING_ROWS = ("dataset_train_split", "task_train_size")
_MOST_FILES = 3  # that a reason names
_MOST_ARMS = 3  # that a note names for a value

Fact = Callable[[Run], str]


def refusal(arm: Arm, rival: Arm) -> str:
    """Return why the scores of two arms cannot be compared; empty if they can, or if nothing is known of them."""
    if not arm.config or not rival.config:
        return ""
    for key in _QUESTIONS:
        ours = arm.config.get(key)
        theirs = rival.config.get(key)
        if ours != theirs:
            return f"{key} is {_value(ours)} and {_value(theirs)}"
    contents = _other_contents(arm, rival)
    if contents:
        return contents
    ours = _version(arm)
    theirs = _version(rival)
    if not ours or not theirs or ours == theirs:
        return ""
    our_grader, _, our_rest = ours.partition("-")
    their_grader, _, their_rest = theirs.partition("-")
    if our_grader != their_grader:
        return f"answers were graded by versions {plain(our_grader)} and {plain(their_grader)} of the grader"
    prompts_differ = False
    for key in _PROMPTS:
        if arm.config.get(key) != rival.config.get(key):
            prompts_differ = True  # noted by `remarks` instead
    if our_rest != their_rest and not prompts_differ:
        return f"the versions of the task are {plain(ours)} and {plain(theirs)}"
    return ""


def _other_contents(arm: Arm, rival: Arm) -> str:
    """Return why two arms have other contents under the same names; empty if they have not, or if it is unknown."""
    ours = _contents(arm)
    theirs = _contents(rival)
    for key in sorted((ours.keys() & theirs.keys()) - {_ROWS}):
        # Where recipes name different things, the recipes differ; where the data lie does not matter.
        if key != "data_dir" and arm.config.get(key) != rival.config.get(key):
            continue
        files = {*ours[key], *theirs[key]}
        changed = sorted(file for file in files if ours[key].get(file) != theirs[key].get(file))
        if changed:
            return f"the contents of {key} differ ({plain(', '.join(changed[:_MOST_FILES]))})"
    our_rows = ours.get(_ROWS, {})
    their_rows = theirs.get(_ROWS, {})
    for split, keys in (("test", _SHAPE_ROWS), ("train", (*_SHAPE_ROWS, *_CHOOSE_TRAINING_ROWS))):
        known = split in our_rows and split in their_rows
        same_settings = all(arm.config.get(key) == rival.config.get(key) for key in keys)
        if known and same_settings and our_rows[split] != their_rows[split]:
            return f"the prompts or answers of their {split} splits differ"
    return ""


def _contents(arm: Arm) -> Mapping[str, Mapping[str, Any]]:
    """Return the hashes of what an arm's recipe names, which its runs share; empty if no run has written them."""
    for run in arm.runs:
        contents = contents_of(run)
        if contents:
            return contents
    return {}


def _version(arm: Arm) -> str:
    """Return the version of an arm's task; empty if no run has written it."""
    for run in arm.runs:
        version = task_of(run).get("version")
        if version is not None:
            return str(version)
    return ""


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    return plain(as_text(value), limit=40)


def remarks(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence for each difference between runs that are compared, other than the method."""
    lines = []
    for fact, sentence in _REMARKS:
        values = _by_value(arms, fact)
        if len(values) > 1:
            parts = [f"{value} ({_named(labels, arms)})" for value, labels in values.items()]
            lines.append(sentence.format("; ".join(parts)))
    return lines


def _by_value(arms: Sequence[Arm], fact: Fact) -> dict[str, list[str]]:
    """Return the labels of the arms by the value of a fact; runs without the fact are skipped."""
    values: dict[str, list[str]] = {}
    for arm in arms:
        for run in arm.runs:
            value = fact(run)
            if value:
                labels = values.setdefault(value, [])
                if arm.label not in labels:
                    labels.append(arm.label)
    return values


def _named(labels: Sequence[str], arms: Sequence[Arm]) -> str:
    if len(labels) > _MOST_ARMS:
        return f"{len(labels)} of {len(arms)} arms"
    return ", ".join(labels)


def _policy(run: Run) -> str:
    return plain(run.config.get("model_name_or_path") or "")


def _prompts(run: Run) -> str:
    if not run.config.get("prompt_style"):
        return ""
    system = run.config.get("system_prompt")
    if system is None:
        written = "the default system prompt"
    elif system == "":
        written = "no system prompt"
    else:
        written = f"system prompt “{plain(system, limit=24)}”"
    return f"{plain(run.config['prompt_style'])}, {written}"


def _size(run: Run) -> str:
    """Return the prompts and the completions of each in the last evaluation."""
    row = _last_evaluation(run)
    prompts = finite(row.get("prompts"))
    repeats = finite(row.get("repeats"))
    if prompts is None:
        return ""
    if repeats is None or repeats == 1:
        return f"{prompts:.0f} prompts"
    return f"{prompts:.0f} prompts x {repeats:.0f}"


def _temperature(run: Run) -> str:
    temperature = finite(_last_evaluation(run).get("temperature"))
    if temperature is None:
        return ""
    return f"{temperature:g}"


def _last_evaluation(run: Run) -> Mapping[str, Any]:
    if not run.evals:
        return {}
    return run.evals[-1]


def _clock(run: Run) -> str:
    return plain(run.config.get("clock") or "")


def _device(run: Run) -> str:
    """Return the device of a run by its model, since two GPUs of one machine are alike; of a CPU its threads."""
    device = plain(run.environment.get("device") or "")
    return plain(run.environment.get("device_name") or "") or device


def _processor(run: Run) -> str:
    """Return the processor of a run that trains on it; runs of earlier versions did not write it."""
    if not str(run.environment.get("device")).startswith("cpu"):
        return ""
    return plain(run.environment.get("processor") or "")


_REMARKS: tuple[tuple[Fact, str], ...] = (
    (_policy, "Runs start from different policies: {}. Differences are not of the method alone."),
    (_prompts, "Prompts are written differently: {}. Differences are not of the method alone."),
    (_size, "Evaluations differ in size: {}. The smaller ones are less exact."),
    (_temperature, "Evaluations sample at different temperatures: {}. Their scores differ for that reason too."),
    (_clock, "Runs have different clocks: {}. Their times cannot be compared."),
    (_device, "Runs used different devices: {}. Their times cannot be compared."),
    (_processor, "Runs used different processors: {}. Their times cannot be compared."),
)
