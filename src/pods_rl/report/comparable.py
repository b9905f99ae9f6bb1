"""Which runs are seeds of one recipe, which arms may be compared, and what else than the method differs.

- **Refused.** The scores measure different things: another task, other questions, another version of the task or of its
  grader, or other contents of the files, modules and policies that both recipes name. Such runs are not pooled, and
  such arms are shown and not compared.
- **Noted.** The scores measure the same, but something else than the method differs: the policy, the form of the
  prompts, how evaluations sample, the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..runs import Run
from ..runs.identity import MODULES
from .text import as_text, listed, one_line

OWN_TO_A_RUN = frozenset({"seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume"})
"""Keys of a recipe that runs of one arm differ in."""

NO_MATTER = frozenset((
    "rollout_batch_size", "vllm_gpu_memory_utilization", "eval_batch_size", "ledger_every", "report_to", "project",
    "push_to_hub", "hub_model_id", "save_seconds", "save_steps", "save_strategy", "save_total_limit",
))  # fmt: skip
"""Keys that decide how memory and disk are used and what is published, not what is learned."""

NOT_OF_THE_METHOD = frozenset((
    "model_name_or_path", "prompt_style", "system_prompt", "eval_prompts", "eval_repeats", "eval_temperature", "clock",
))  # fmt: skip
"""Keys that change scores or times whatever the method is; a difference in them is noted."""

# keys of a recipe that choose the questions of an evaluation and their answers
_QUESTIONS = (
    "task", "task_difficulty", "task_options", "task_test_size", "task_seed", "dataset_name", "dataset_config",
    "dataset_test_name", "question_column", "answer_column",
)  # fmt: skip
_PROMPTS = ("prompt_style", "system_prompt")  # they are part of a task's version
# by split, the keys that decide how its rows are written
_KEYS_OF_ROWS = {
    "test": (*_PROMPTS, "task_rewards"),
    "train": (*_PROMPTS, "task_rewards", "dataset_train_split", "task_train_size"),
}

RecipeKeys = Mapping[str, Any]
Runs = Sequence[Run]


def config_of(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the recipe of the first run that has a readable one; empty if none has."""
    return _first_mapping(run.config for run in runs)


def task_of(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the name, version and sizes of the task of the first run that has written them; empty if none has."""
    return _first_mapping(run.environment.get("task") for run in runs)


def _first_mapping(values: Iterable[Any]) -> dict[str, Any]:
    """Return the first mapping that is not empty, among values from files that may hold anything."""
    for value in values:
        if isinstance(value, Mapping) and value:
            return {str(key): entry for key, entry in value.items()}
    return {}


def recipe_difference(runs: Runs, run: Run) -> str:
    """Return why a run is not another seed of the recipe of some runs; empty if it is, or if nothing is known of it."""
    ours = config_of(runs)
    theirs = config_of([run])
    for key in settings_that_differ(ours, theirs):
        return _differs(key, ours, theirs)
    return why_incomparable(runs, [run])


def settings_that_differ(ours: RecipeKeys, theirs: RecipeKeys) -> list[str]:
    """Return the keys of two recipes with other values, without those of a run alone; empty if one is unknown."""
    if not ours or not theirs:
        return []
    keys = {*ours, *theirs} - OWN_TO_A_RUN - NO_MATTER
    return sorted(str(key) for key in keys if as_text(ours.get(key)) != as_text(theirs.get(key)))


def why_incomparable(ours: Runs, theirs: Runs) -> str:
    """Return why the scores of the runs of two arms cannot be compared; empty if they can, or if it is unknown."""
    our_recipe = config_of(ours)
    their_recipe = config_of(theirs)
    if not our_recipe or not their_recipe:
        return ""
    other_keys = settings_that_differ(our_recipe, their_recipe)
    for key in _QUESTIONS:
        if key in other_keys:
            return _differs(key, our_recipe, their_recipe)
    our_contents = _first_mapping(run.environment.get("contents") for run in ours)
    their_contents = _first_mapping(run.environment.get("contents") for run in theirs)
    reason = _other_contents(other_keys, our_contents, their_contents)
    if reason:
        return reason
    our_version = str(task_of(ours).get("version") or "")
    their_version = str(task_of(theirs).get("version") or "")
    if not our_version or not their_version or our_version == their_version:
        return ""
    our_grader, _, _ = our_version.partition("-")
    their_grader, _, _ = their_version.partition("-")
    if our_grader != their_grader:
        return f"answers were graded by versions {one_line(our_grader)} and {one_line(their_grader)} of the grader"
    if {*_PROMPTS} & {*other_keys}:
        return ""  # noted instead (`NOT_OF_THE_METHOD`)
    return f"the versions of the task are {one_line(our_version)} and {one_line(their_version)}"


def _differs(key: str, ours: RecipeKeys, theirs: RecipeKeys) -> str:
    values = [
        "not set" if config.get(key) is None else one_line(as_text(config[key]), limit=40) for config in (ours, theirs)
    ]
    return f"{one_line(key)} is {values[0]} and {values[1]}"


def _other_contents(other_keys: Sequence[str], ours: RecipeKeys, theirs: RecipeKeys) -> str:
    """Return which contents differ although both recipes name the same; empty if none do, or if it is unknown.

    Contents are hashes by key of the recipe and file; `other_keys` are those in which the recipes differ.
    """
    for key in sorted(ours.keys() & theirs.keys()):
        if key in other_keys and key != "data_dir":  # the recipes differ there; where the data lie does not matter
            continue
        our_files = ours[key]
        their_files = theirs[key]
        if not isinstance(our_files, Mapping) or not isinstance(their_files, Mapping):
            continue
        files = {*our_files, *their_files}
        shared = {*our_files} & {*their_files}
        if key == MODULES:
            files = shared  # what else one of them has imported does not matter
        if key == "prompts":  # hashes of the task's rows; all other contents are of keys of a recipe
            files = {split for split in shared if not {*_KEYS_OF_ROWS.get(split, ())} & {*other_keys}}
        changed = sorted(str(file) for file in files if our_files.get(file) != their_files.get(file))
        if changed:
            return f"the contents of {one_line(key)} differ ({listed(changed)})"
    return ""


def machine_notes(arms: Mapping[str, Runs]) -> list[str]:
    """Return a sentence if runs that are compared used different GPUs or processors; runs by label."""
    labels: dict[str, dict[str, None]] = {}  # by machine, each once
    for label, runs in arms.items():
        for run in runs:
            device = str(run.environment.get("device") or "")
            names = [run.environment.get("device_name") or device]
            if device.startswith("cpu"):
                names.append(run.environment.get("processor"))
            machine = one_line(", ".join(str(name) for name in names if name))
            if machine:
                labels.setdefault(machine, {})[label] = None
    if len(labels) < 2:
        return []
    parts = [f"{machine} ({listed([*of_machine])})" for machine, of_machine in labels.items()]
    return [f"Runs used different machines: {'; '.join(parts)}. Their times cannot be compared."]
