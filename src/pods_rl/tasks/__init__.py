"""Tasks: prompts, gold answers, rewards and a grader, each with a version; made by `load_task`.

A task is one function of the settings and one entry in `TASKS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..errors import UserError, raised
from ..rewards import check_reward
from ..text import counted, find
from .checks import check_own_task
from .chemistry import CHEMISTRY, chemistry_task
from .generated import GYM, arithmetic_task, gym_task
from .prompts import Fitted, fit_prompts
from .questions import PUBLISHED, dataset_task, published_task
from .task import (
    BY_ENVIRONMENT,
    FORM_REWARDS,
    PAPER_REWARDS,
    Grade,
    Prompt,
    Settings,
    Task,
    deciding_reward,
    last_turn,
    row_hashes,
    shared_prompts,
)
from .words import words_task


@dataclass(frozen=True)
class TaskEntry:
    """An entry of `TASKS`: a task's constructor, its description, the source of its rows, and its deciding reward.

    `folders` are the names that its folder under `data_dir` may have, for a task that reads one.
    """

    make: Callable[[Settings], Task]
    what: str
    source: str
    answer: str = "accuracy"
    folders: tuple[str, ...] = ()

    @property
    def rewards(self) -> dict[str, float]:
        """The default rewards with their weights."""
        return {self.answer: 1.0, **FORM_REWARDS}


def load_task(settings: Settings, *, reward_errors: str = "raise", check: bool = True) -> Task:
    """Make the task of a recipe. A setting that is absent or None has the task's default.

    `task` is a key of `TASKS` (default: `dataset` if `dataset_name` is given, else `arithmetic`), or the dotted path of
    a function of your own that takes the settings and returns a `Task`. `task_rewards` maps names of rewards,
    or dotted paths, to weights, and replaces the task's own. `reward_seconds` and `reward_errors` are those of `Task`.
    `check`: raise for prompts and gold answers of your own function's task that cannot be used.

    Which settings a task reads:

    - all but `arithmetic`: `system_prompt`, `prompt_style` (`chat`, `plain`);
    - generated ones (`arithmetic`, `words`, `reasoning_gym:NAME`): `task_train_size`, `task_test_size`, `task_seed`;
      the last one `task_options`, the others `task_difficulty`;
    - published ones (`gsm8k`, `math`, `amc23`, `sciknoweval_chemistry`): `data_dir`, a local folder instead of the hub;
    - `dataset`: `dataset_name` (a local file or folder, or a hub id), `dataset_config`, `dataset_train_split`,
      `dataset_test_name` (a split, or where else the test rows are), `question_column`, `answer_column`.

    Raises UserError for an unknown task, an unknown reward, or settings that the task refuses.

    >>> load_task({"task": "arithmetic", "task_train_size": 4, "task_test_size": 2}).name
    'arithmetic'
    """
    name = str(settings.get("task") or ("dataset" if settings.get("dataset_name") else "arithmetic"))
    entry = GYM_TASKS if name.startswith(f"{GYM}:") else find("task", name, TASKS)
    task = _make(name, entry, settings)
    weights = settings.get("task_rewards")
    if weights is not None:
        task = dataclasses.replace(task, rewards={reward: float(weight) for reward, weight in weights.items()})
    seconds = settings.get("reward_seconds")
    answer = deciding_reward(task.rewards, task.answer, environment=task.environment_factory is not None)
    task = dataclasses.replace(task, answer=answer, reward_seconds=seconds, reward_errors=reward_errors)
    of_task = {BY_ENVIRONMENT, *(grader.name for grader in task.graders)}
    for reward in (*task.rewards, task.answer):
        if reward is not None and reward not in of_task:
            check_reward(reward, seconds)
    if check and not isinstance(entry, TaskEntry):
        check_own_task(task)
    shared = shared_prompts(task)
    if not shared:
        return task
    return dataclasses.replace(
        task, notes=(*task.notes, f"{counted(shared, 'test prompt')} also in the training split")
    )


def _make(name: str, entry: TaskEntry | Callable[[Settings], object], settings: Settings) -> Task:
    """Return the task of an entry or of a user's function."""
    if isinstance(entry, TaskEntry):
        return entry.make(settings)
    try:
        task = entry(settings)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the task '{name}' could not be made: {raised(error)}") from error
    if not isinstance(task, Task):
        raise UserError(
            f"the task '{name}' returned {type(task).__name__}; expected a function of the settings that returns a "
            "pods_rl.tasks.Task"
        )
    return task


def _published(name: str, what: str) -> TaskEntry:
    train, test = PUBLISHED[name]
    source = ", ".join(dict.fromkeys((train.hub, test.hub)))
    return TaskEntry(partial(published_task, name), what, source, folders=test.folders)


TASKS: dict[str, TaskEntry] = {
    "arithmetic": TaskEntry(arithmetic_task, "sums of two to six integers, for the tiny policy", "generated"),
    "words": TaskEntry(words_task, "word problems of one to four steps, in English", "generated"),
    "gsm8k": _published("gsm8k", "grade-school word problems"),
    "math": _published("math", "competition mathematics, tested on MATH-500"),
    "amc23": _published("amc23", "AMC 2023 to test, MATH to train on"),
    CHEMISTRY: TaskEntry(
        chemistry_task,
        "chemistry: choices, judgements, equations",
        "hicai-zju/SciKnowEval",
        "chemistry",
        folders=(CHEMISTRY,),
    ),
    "dataset": TaskEntry(dataset_task, "your own questions and answers", "dataset_name: a file, folder or hub id"),
}
# the tasks `reasoning_gym:NAME`
GYM_TASKS = TaskEntry(gym_task, "graded by the data set's own scorer", "reasoning-gym: pods-rl[reasoning-gym]", GYM)

__all__ = [
    "GYM_TASKS",
    "PAPER_REWARDS",
    "TASKS",
    "Fitted",
    "Grade",
    "Prompt",
    "Task",
    "TaskEntry",
    "fit_prompts",
    "last_turn",
    "load_task",
    "row_hashes",
]
