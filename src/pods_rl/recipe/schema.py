"""Every key that a recipe may have, each defined once. Does not import torch.

The keys of training are those of TRL, transformers and PODSConfig. They are parsed from the source of these classes:
importing them takes many seconds and loads torch. The keys of the task and of the run are below. Then follow the
differences from TRL: defaults, refused keys, and values that TRL, transformers and torch accept although no run can
use them.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..engines.bounds import CHOICES, INTERVALS, inside
from ..errors import UserError
from ..text import DEEPEST, depth, describe, documented_arguments, short, suggest
from ..yaml_files import YAMLError, parse_value

COMPUTED = "(chosen at run time)"  # a default that is not a literal in the source
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "None": "null",
}
# package, file, class, part of a run; base classes first, since a later class replaces fields of an earlier one
_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments", "engine"),
    ("trl", "trainer/base_config.py", "_BaseConfig", "engine"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig", "engine"),
    ("trl", "trainer/model_config.py", "ModelConfig", "model"),
)
_NUMBER_KINDS = frozenset(("int", "float"))
_TYPES = {"bool": bool, "str": str, "list": list, "dict": Mapping, "None": type(None)}  # of values that are not numbers
_LARGEST_INTEGER = 2**63 - 1  # torch and the files of a run cannot hold larger integers
_NUMERAL = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Field:
    """A key of a recipe.

    Args:
        kinds: the YAML types it accepts (keys of `KINDS`, or ``Any``).
        section: the part of a run that reads this key: engine, model, task or run.
        source: the origin of its default.
        within: the interval of a number, as in ``(0, 1]``; a bracket includes its end. Empty: any number.
    """

    name: str
    kinds: frozenset[str]
    default: Any
    help: str
    section: str
    source: str
    choices: tuple[str, ...] = ()
    within: str = ""

    @property
    def expected(self) -> str:
        """The accepted values, in words.

        >>> Field("x", frozenset({"float", "None"}), None, "", "run", "").expected
        'a number or null'
        """
        if self.choices and self.kinds <= {"str", "list", "None"}:
            return f"one of {', '.join(self.choices)}" + (" or null" if "None" in self.kinds else "")
        if "Any" in self.kinds:
            return "anything"
        return " or ".join(KINDS[kind] for kind in KINDS if kind in self.kinds)

    def convert(self, value: Any) -> Any:
        """Return the value as this key's type; raise ValueError (what was given, what was expected) if it has another.

        Numbers written as text are read as numbers: YAML 1.1 reads ``1e-6`` as text, and its meaning is clear.

        >>> Field("learning_rate", frozenset({"float"}), 1e-6, "", "engine", "").convert("1e-6")
        1e-06
        """
        if not _is_plain(value):
            raise ValueError(
                f"got {describe(value)}, expected finite numbers below 2^63 and text in it, and text as keys."
            )
        try:
            converted = value if "Any" in self.kinds else _convert(value, self.kinds)
        except TypeError:
            raise ValueError(f"got {describe(value)}, expected {self.expected}.") from None
        if self.choices and isinstance(converted, str) and converted not in self.choices:
            raise ValueError(f"got {describe(value)}.{suggest(converted, self.choices)} Expected {self.expected}.")
        if self.within and isinstance(converted, (int, float)) and not inside(converted, self.within):
            raise ValueError(f"got {converted}, expected a number in {self.within}.")
        return converted

    def parse(self, text: str) -> Any:
        """Return the value of a command-line word, read as YAML unless the key accepts only text.

        >>> Field("seeds", frozenset({"list"}), None, "", "run", "").parse("[1, 2]")
        [1, 2]
        """
        if self.kinds <= {"str"}:
            return self.convert(text)
        try:
            value = parse_value(text)
            if "str" in self.kinds:  # `--run_name 12` is a name, `--run_name #1` is not a comment
                _convert(value, self.kinds - {"str"})
                if value is None and text.strip() not in ("null", "~"):
                    value = text
        except (YAMLError, TypeError):
            value = text
        return self.convert(value)


def _convert(value: Any, kinds: frozenset[str]) -> Any:
    """Return the value as one of these types, or raise TypeError."""
    if isinstance(value, str) and "str" not in kinds and kinds & _NUMBER_KINDS and _NUMERAL.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer() and "float" not in kinds:
        value = int(value)
    if _is_number_of(value, kinds):
        return value if "int" in kinds else float(value)  # transformers refuses `repetition_penalty: 1`
    for kind, its_type in _TYPES.items():
        if kind in kinds and isinstance(value, its_type):
            return value
    if "list" in kinds and isinstance(value, str):  # `lora_target_modules: all-linear`
        return [value]
    if value is False and "str" in kinds:  # YAML 1.1 reads a bare `no` as false
        return "no"
    raise TypeError


def _is_number_of(value: Any, kinds: frozenset[str]) -> bool:
    """Return whether a value is a number that a key of these types can hold. A boolean is not a number here."""
    if isinstance(value, bool) or not kinds & _NUMBER_KINDS:
        return False
    if isinstance(value, int):
        return abs(value) <= _LARGEST_INTEGER
    return isinstance(value, float) and "float" in kinds and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    """Return whether the files of a run can hold a value: a list or mapping of finite numbers and text."""
    if value is None or isinstance(value, float):  # the checks of numbers refuse infinity, with a better message
        return True
    try:
        is_json = json.loads(json.dumps(value, allow_nan=False), parse_int=_small_integer) == value
    except (TypeError, ValueError, RecursionError):  # a date, infinity, a list that contains itself
        return False
    return is_json and depth(value) <= DEEPEST


def _small_integer(digits: str) -> int:
    """Return an integer of JSON; raise ValueError if the files of a run cannot hold it."""
    if abs(int(digits)) > _LARGEST_INTEGER:
        raise ValueError
    return int(digits)


def parse_overrides(words: list[str], stray: list[str] | None = None) -> dict[str, str | bool]:
    """Read ``--key value``, ``--key=value`` and bare ``--flag`` (true); the last one of a key wins.

    Any other word goes into ``stray``, or raises UserError.

    >>> parse_overrides(["--num-rollouts", "64", "--beta=0.04", "--use_cpu"])
    {'num_rollouts': '64', 'beta': '0.04', 'use_cpu': True}
    """
    overrides: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--") or word == "--":
            if stray is None:
                raise UserError(f"Unexpected argument {short(word)!r}: expected --key value, as in --seed 1.")
            stray.append(word)
        elif equals:
            overrides[key] = value
        elif rest and not rest[0].startswith("--"):
            overrides[key] = rest.pop(0)
        else:  # a flag alone
            overrides[key] = True
    return overrides


@cache
def trl_fields() -> dict[str, Field]:
    """Return every field of GRPOConfig (with its bases) and ModelConfig, by name."""
    return {field.name: field for class_of_keys in _CLASSES for field in _read_class(*class_of_keys)}


def parse_annotation(annotation: str) -> frozenset[str]:
    """Return the types that an annotation names. An enumeration is text in YAML.

    >>> sorted(parse_annotation("list[float] | None"))
    ['None', 'list']
    """
    kinds = set()
    for part in annotation.replace("Literal[False]", "bool").split("|"):
        name, _, _ = part.strip().partition("[")  # list[float] is a list
        kinds.add(name if name in KINDS or name == "Any" else "str")
    return frozenset(kinds)


def _read_class(package: str, file: str, name: str, section: str) -> Iterator[Field]:
    """Read the fields of a dataclass from its source: their types, defaults and help."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    class_node = classes[name]
    documented = documented_arguments(ast.get_docstring(class_node) or "")
    for node in class_node.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key = node.target.id
        options = {"default": _literal(node.value)}
        if isinstance(node.value, ast.Call):  # field(...)
            options = {word.arg or "": _literal(word.value) for word in node.value.keywords}
        if key.startswith("_") or options.get("init") is False:
            continue
        metadata = options.get("metadata") or {}
        help = str(metadata.get("help", documented.get(key, "")))
        choices = metadata.get("choices") or ()
        if not isinstance(choices, (list, tuple)):  # computed
            choices = ()
        yield Field(
            name=key,
            kinds=parse_annotation(ast.unparse(node.annotation)),
            default=options.get("default", COMPUTED),
            help=" ".join(help.replace("%%", "%").split()),  # argparse writes %% for a percent sign
            section=section,
            source=name,
            choices=tuple(choices),
        )


def _literal(node: ast.expr | None) -> Any:
    """Return the value of a literal; COMPUTED for any other expression, also inside a dictionary."""
    if node is None:
        return COMPUTED
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return COMPUTED


# -- the keys of the task and of the run ------------------------------------------------------------------------------

REWARDS = ("accuracy", "format", "tag_count", "choice", "equation", "chemistry", "overlong")
TASKS = ("arithmetic", "words", "gsm8k", "math", "amc23", "sciknoweval_chemistry", "dataset")
GYM = "reasoning_gym"  # tasks of this library are reasoning_gym:NAME


def _key(default: Any, help: str, *, source: str = "", within: str = "", choices: tuple[str, ...] = ()) -> Any:
    """Return the dataclass field of a key; `Field` describes the arguments."""
    return dataclasses.field(
        default=default, metadata={"help": help, "source": source, "within": within, "choices": choices}
    )


# fmt: off
# ruff: noqa: RUF009  (`_key` makes a dataclasses.field)
@dataclass
class TaskKeys:
    """The task: its data and rewards."""

    task: str = _key(
        "arithmetic", f"The task to train on: {', '.join(TASKS)}, reasoning_gym:NAME, or a function of your "
        "own as package.module:function. dataset reads your own prompts and answers. `pods tasks` describes each.",
        source="needs no download")
    task_difficulty: str = _key(
        "mixed", "Difficulty of the generated tasks arithmetic and words: easy, mixed or hard.",
        source="the tiny policy's own", choices=("easy", "mixed", "hard"))
    task_options: dict[str, Any] | None = _key(
        None, "Options of the data set of a task reasoning_gym:NAME, as in {max_terms: 4}.")
    task_train_size: int | None = _key(
        None, "Number of training prompts to use, from the first. If null, the full split; generated tasks make 4096.",
        source="the full split", within="[1, inf)")
    task_test_size: int | None = _key(
        None, "Number of test prompts to use, from the first. If null, the full split; generated tasks make 512.",
        source="the full split", within="[1, inf)")
    task_seed: int = _key(
        0, "Seed of generated prompts. Separate from seed, so that runs of different seeds train on the same task.",
        source="one task for all seeds", within="[0, 4294967295]")
    data_dir: str | None = _key(
        None, "Folder with the data of gsm8k, math, amc23 or sciknoweval_chemistry, in its folders gsm8k, math, "
        "math500 and so on. They replace those of the hub; the prompts are the same.",
        source="read the hub")
    dataset_name: str | None = _key(
        None, "A JSONL or parquet file, a directory, or a hub id, with the training prompts.")
    dataset_config: str | None = _key(None, "Configuration of dataset_name, if it is a data set of the hub.")
    dataset_train_split: str = _key("train", "Split of dataset_name to train on.", source="hub custom")
    dataset_test_name: str | None = _key(
        None, "The test prompts: a split of dataset_name, as in validation or train[90%:], or another file, directory "
        "or hub id (owner/name).", source="the split test, else validation, else one prompt in ten")
    question_column: str | None = _key(
        None, "Column with the question (or the chat messages).", source="the task's own")
    answer_column: str | None = _key(None, "Column with the gold answer.", source="the task's own")
    system_prompt: str | None = _key(
        None, "System message before every question. Empty text means none.",
        source="none for a shipped policy, else the task's own")
    prompt_style: str | None = _key(
        None, "Form of a prompt: chat (messages, rendered with the model's template) or plain (text). A model without "
        "a template gets text in both cases.", source="plain for a shipped policy, else the task's own",
        choices=("chat", "plain"))
    task_rewards: dict[str, float] | None = _key(
        None, "Rewards and their weights, such as {accuracy: 1.0, format: 0.1}.", source="the task's own")
    reward_seconds: float | None = _key(
        60.0, "Timeout in seconds for a reward of your own to score one completion; its process is then killed. If "
        "null, score in the training process, without a timeout. Built-in rewards have timeouts of their own.",
        source="enough for a slow judge, and a hang costs a minute, not the run", within="(0, 1e9]")
    max_prompt_length: int | None = _key(
        None, "Skip training prompts with more tokens than this, and log how many. Test prompts are counted and never "
        "skipped, so the test set stays as published.", source="no limit; the paper has 512", within="[1, inf)")


@dataclass
class RunKeys:
    """How long a run trains, and what it evaluates, saves and keeps."""

    max_seconds: float | None = _key(
        None, "Stop after this many seconds of training clock, which excludes evaluation. If null, max_steps or "
        "num_train_epochs stops the run.", within="(0, inf)")
    eval_seconds: float | None = _key(
        None, "Seconds of training clock between evaluations. A run also evaluates at its start and at its end.",
        within="(0, inf)")
    save_seconds: float | None = _key(
        None, "Seconds of training clock between checkpoints; save_steps counts steps instead. If null without "
        "save_steps, a run saves none until it ends or a signal stops it.",
        source="1800 as in the paper, keeping two, if no key says when to save", within="(0, inf)")
    eval_prompts: int | None = _key(
        None, "Number of test prompts to evaluate on, from the first. If 0, a run never evaluates.",
        source="the full test split, as in the paper", within="[0, inf)")
    eval_repeats: int = _key(
        1, "Completions sampled per test prompt in an evaluation.", source="the paper has 5", within="[1, 10000]")
    eval_temperature: float | None = _key(
        None, "Temperature of sampling in evaluation; 0 is greedy.", source="temperature, as in the paper",
        within="[0, inf)")
    eval_batch_size: int = _key(
        256, "Completions generated at once in an evaluation.", source="fits the tiny policy", within="[1, 1e6]")
    ledger_every: int = _key(
        10, "Write every rollout of every Nth step under rollouts/. If 0, write none.",
        source="every tenth step",
        within="[0, inf)")
    threads: int | None = _key(None, "CPU threads of torch.", source="torch's own", within="[1, 4096]")
# fmt: on


# defaults that differ from those of TRL and PODSConfig: (value, why)
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "skip_zero_advantage_steps": (True, "all arms of an experiment skip alike, plain GRPO too"),
    "beta": (0.0, "paper: no KL term"),
    "epsilon": (0.2, "paper, section 3.1"),
    "lr_scheduler_type": ("constant", "paper, appendix; a wall-clock budget gives no length to decay over"),
    "logging_steps": (1.0, "a line of metrics.jsonl per step (TRL: 10)"),
}

# what a configuration accepts in some cases, and keys of the model, which no library checks before it loads
_INTERVALS = INTERVALS | {
    "max_steps": "[-1, 1e12]",
    "num_train_epochs": "(0, inf)",
    "lora_r": "[1, 65536]",
    "lora_alpha": "[1, 1e9]",
    "lora_dropout": "[0, 1]",
}
_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_KEY_CHOICES = CHOICES | {
    "save_strategy": ("no", "steps", "epoch"),  # "best" needs TRL's evaluation
    "log_level": _LOG_LEVELS,
    "log_level_replica": _LOG_LEVELS,
}

# TRL's keys that `pods train` always writes into config.yaml, set or not: they define a run
_RECORDED = (
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "weight_decay", "max_grad_norm", "temperature", "max_completion_length",
    "num_iterations", "loss_type", "beta", "epsilon", "scale_rewards", "logging_steps", "seed",
    "model_name_or_path", "dtype", "use_peft", "save_total_limit",
)  # fmt: skip

# TRL's keys that a recipe refuses unless they have TRL's default: what to do instead
UNSUPPORTED = {
    "output_dir": "a run keeps everything in its own directory: choose it with --output",
    "resume_from_checkpoint": "continue a run with --resume",
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "a run pushes its final policy once, at its end"),
    "ignore_data_skip": "a run that skips no prompts could never resume from its checkpoints",
    "remove_unused_columns": "rewards read the columns that it removes",
    "trust_remote_code": "the code of a repository never runs, so only architectures of transformers can be trained",
    "hub_token": "a recipe is saved with the run, so it must hold no secret: set HF_TOKEN in the environment",
    "reward_weights": "a recipe has rewards and weights in one mapping: task_rewards: {accuracy: 1.0, format: 0.1}",
    **dict.fromkeys((
        "do_eval", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
        "per_device_eval_batch_size", "num_generations_eval", "bf16_full_eval", "fp16_full_eval",
        "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics",
        "include_for_metrics", "metric_for_best_model", "greater_is_better", "do_predict",
    ), "a recipe evaluates by training clock: use eval_seconds, eval_prompts, eval_repeats and eval_batch_size"),
    **dict.fromkeys(("label_smoothing_factor", "label_names"), "the loss of GRPO has no labels"),
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name"), "TRL's sampler of groups replaces it; see shuffle_dataset"
    ),
    "load_best_model_at_end": "it needs TRL's evaluation; checkpoints are kept under checkpoints/",
    "save_only_model": "a run cannot resume from a checkpoint without its optimizer; checkpoints/final has the policy",
    "enable_jit_checkpoint": "SIGTERM and Ctrl-C save a checkpoint without it",
    "auto_find_batch_size": "a smaller batch would break up the groups: set rollout_batch_size, or a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps",
}  # fmt: skip


@cache
def fields() -> dict[str, Field]:
    """Return every known key, ours first.

    >>> fields()["num_rollouts"].source, fields()["temperature"].source
    ('PODSConfig', 'GRPOConfig')
    """
    keys = {field.name: field for field in _read_class("pods_rl", "engines/trl/config.py", "PODSConfig", "engine")}
    for section, dataclass_of_keys in (("task", TaskKeys), ("run", RunKeys)):
        for key in dataclasses.fields(dataclass_of_keys):
            kinds = parse_annotation(str(key.type))
            keys[key.name] = Field(key.name, kinds, key.default, section=section, **key.metadata)
    keys |= trl_fields()  # which has none of these names
    for name, (default, why) in _DEFAULTS.items():
        keys[name] = replace(keys[name], default=default, source=why)
    for name, choices in _KEY_CHOICES.items():
        keys[name] = replace(keys[name], choices=choices)
    for name, interval in _INTERVALS.items():
        keys[name] = replace(keys[name], within=interval)
    keys["fsdp"] = replace(keys["fsdp"], kinds=keys["fsdp"].kinds | {"bool"})  # its help allows True
    return keys


def defaults() -> dict[str, Any]:
    """Return the default recipe: all of our keys, and the keys of TRL that define a run."""
    ours = [name for name in fields() if name not in trl_fields()]
    return {name: fields()[name].default for name in (*_RECORDED, *ours)}


def explain(name: str) -> str:
    """Return type, default and help of a key, for ``pods train --explain KEY``."""
    field = fields()[name]
    default = "null" if field.default is None else str(field.default)
    if field.source:
        default += f" ({field.source})"
    library = "transformers / TRL" if name in trl_fields() else "pods-rl"
    lines = [
        f"{name}: {field.expected}",
        f"  default  {default}",
        f"  from     {library}, part: {field.section}",
        f"  {field.help}",
    ]
    if name in UNSUPPORTED:
        lines.append(f"  Not in a recipe: {UNSUPPORTED[name]}.")
    return "\n".join(lines)
