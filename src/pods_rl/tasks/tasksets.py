"""`verifiers:NAME`: a taskset of the library `verifiers`, graded by its own rewards, with its own tools.

The policy answers in a chat; no harness program runs. What needs more than the conversation is refused.
"""

from __future__ import annotations

import hashlib
import json
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from datasets import Dataset

from ..errors import UserError, raised
from ..rewards import library_reward
from ..rewards.gym import numbered, unnumbered
from ..rewards.tasksets import needs_runtime
from .generated import is_held_out, sizes_of
from .prompts import PromptForm
from .task import Messages, Prompt, Settings, Task
from .toolsets import environment_of

VERIFIERS = "verifiers"
Rows = dict[int, tuple[bool, Prompt, Any]]  # by place in the taskset: whether it is a test row, its prompt, its task
_READ_PER_PROMPT = 200  # at most, of a taskset that never ends


def taskset_task(settings: Settings) -> Task:
    """Make the task of a taskset, `task: verifiers:NAME`; `task_options` holds the taskset's own options.

    One prompt in five, by a hash of it, is a test prompt; each split has the first of them, at most `task_train_size`
    and `task_test_size`. The reward `verifiers` is the sum of the taskset's rewards with their weights, in processes
    that are killed when they hang; an answer is right from 1.0. Tools of the taskset run in this process. Prompts are
    the taskset's; a `system_prompt` of the recipe is added where there is none.

    Raises UserError if verifiers is not installed, for an unknown taskset or option, and for a taskset that needs more
    than a conversation with tools: an environment or a harness of its own, a container, files, images, or a user.
    """
    name, options = str(settings["task"]).partition(":")[2], dict(settings.get("task_options") or {})
    if find_spec("verifiers") is None:
        raise UserError(
            f"task {VERIFIERS}:{name} needs verifiers, which is not installed: pip install 'pods-rl[verifiers]'"
        )
    form = PromptForm.of({"system_prompt": "", **{key: value for key, value in settings.items() if value is not None}})
    try:
        taskset = _load(name, options)
        rows = _read(name, taskset, form, sizes_of(settings))
        train, test = (_split(name, rows, held_out) for held_out in (False, True))
        environment = _environment(name, taskset, {row: task for row, (_, _, task) in rows.items()})
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{VERIFIERS}:{name} could not be loaded with {options}: {raised(error)}") from error
    data = {row: task.data.model_dump_json(exclude_defaults=True) for row, (_, _, task) in rows.items()}
    work = json.dumps([name, options, environment is not None])
    grader = library_reward(
        VERIFIERS,
        ("pods_rl.rewards.tasksets:scoring", work),
        gold=lambda gold: None,  # how an answer must be written is known to the taskset alone
        given=lambda gold: data[unnumbered(gold)[1]],
        reads="text" if environment is None else "messages",
    )
    version = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:8]
    return Task(
        f"{VERIFIERS}/{name}",
        form.version(f"{metadata.version('verifiers')}.{version}"),
        train,
        test,
        {VERIFIERS: 1.0},
        VERIFIERS,
        graders=(grader,),
        environment_factory=environment,
    )


def _load(name: str, options: dict[str, Any]) -> Any:
    """Return the taskset; raise UserError for an unknown one, and for one that needs more than a conversation."""
    vf = import_module("verifiers.v1")
    try:
        vf.import_taskset(name)
    except ModuleNotFoundError as error:
        module = name.replace("-", "_")
        if error.name and error.name != module and not str(error).startswith("taskset "):
            raise
        near = get_close_matches(module, [found.name for found in iter_modules()], n=3)
        hint = f"; installed modules of similar names: {', '.join(near)}" if near else ""
        raise UserError(f"there is no taskset {name!r} for verifiers: install its package{hint}") from error
    own = vf.environment_class(name)
    if own is not vf.SingleAgentEnv:
        raise UserError(
            f"verifiers:{name} has an environment of its own, {own.__name__}, which decides who speaks when: only "
            "tasksets whose tasks are one prompt, with or without tools, are supported"
        )
    if vf.default_harness_id(name) != "bash":  # the library's default
        raise UserError(f"verifiers:{name} has a harness of its own, a program that runs the policy: not supported")
    kind = vf.taskset_config_type(name)
    try:
        return vf.load_taskset(kind.model_validate({**options, "id": name}))
    except import_module("pydantic").ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(key for key in kind.model_fields if key != "id")
        raise UserError(
            f"task_options: verifiers:{name} rejects {'.'.join(map(str, first['loc']))}: {first['msg']}. Its options "
            f"are {known}"
        ) from error


def _read(name: str, taskset: Any, form: PromptForm, sizes: tuple[int, int]) -> Rows:
    """Return the rows of both splits, until both are full or the taskset ends."""
    rows: Rows = {}
    wanted = dict(zip((False, True), sizes, strict=True))
    for row, task in enumerate(taskset):
        if not any(wanted.values()) or row >= _READ_PER_PROMPT * sum(sizes):
            break
        if not rows:
            _check(name, task)
        asked = _messages(name, task.data)
        side = is_held_out(json.dumps(asked))
        if wanted[side]:
            wanted[side] -= 1
            rows[row] = side, form.write(asked), task
    return rows


def _split(name: str, rows: Rows, held_out: bool) -> Dataset:
    columns: dict[str, list[Any]] = {"prompt": [], "answer": []}
    for row, (side, prompt, task) in rows.items():
        if side == held_out:
            columns["prompt"].append(prompt)
            columns["answer"].append(numbered(getattr(task.data, "answer", None), row))
    if not columns["prompt"]:
        side = "test" if held_out else "train"
        raise UserError(f"verifiers:{name} has no {side} prompt among its {len(rows)}: one in five is a test prompt")
    return Dataset.from_dict(columns)


def _check(name: str, task: Any) -> None:
    """Raise UserError for a kind of task that a conversation in this process cannot serve."""
    vf, decorators = import_module("verifiers.v1"), import_module("verifiers.v1.utils.decorators")
    own = [
        getattr(task, hook) for hook in ("setup", "finalize") if getattr(type(task), hook) is not getattr(vf.Task, hook)
    ]
    rewards = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    if not rewards:
        raise _unsupported(name, "its tasks have no reward")
    if needing := [hook.__name__ for hook in (*own, *rewards, *task.hooks("metric")) if needs_runtime(hook)]:
        raise _unsupported(name, f"{', '.join(needing)} of its tasks needs the box that a harness program runs in")
    if decorators.discover_decorated(task, "intercept"):
        raise _unsupported(name, "its tasks intercept requests to the model")


def _messages(name: str, data: Any) -> Messages:
    """Return a task's prompt as chat messages; raise UserError if it needs more than text."""
    if data.prompt is None:
        raise _unsupported(name, f"task {data.idx} has no prompt, so a user would begin")
    if data.image or data.skills or data.artifacts:
        raise _unsupported(name, f"task {data.idx} needs a container or files")
    asked = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*asked, {"role": "user", "content": data.prompt}]
    for message in data.prompt:
        content = message.content
        if not isinstance(content, str):
            if any(part.type != "text" for part in content or ()):
                raise _unsupported(name, f"task {data.idx} has an image")
            content = "".join(part.text for part in content or ())
        asked.append({"role": message.role, "content": content})
    return asked


def _environment(name: str, taskset: Any, tasks: dict[int, Any]) -> type | None:
    """Return the class of the taskset's environments, or None if it has no tools."""
    kind, config = type(taskset).task_type(), taskset.config
    shared = type(taskset).toolsets(config)
    if not shared and not kind.toolsets(config.task):
        return None
    if next(iter(tasks.values())).hooks("stop"):
        raise _unsupported(name, "its tasks stop the conversation by a hook of their own")
    return environment_of(name, shared, lambda: kind.toolsets(config.task), tasks.__getitem__)


def _unsupported(name: str, why: str) -> UserError:
    return UserError(f"verifiers:{name} needs more than a conversation with tools: {why}. Choose another taskset")
