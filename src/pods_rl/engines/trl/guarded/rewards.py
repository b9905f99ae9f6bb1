"""Check each call of a reward function; handle and count its failures.

Return values are checked, exceptions are handled as `reward_errors` says, and rollouts whose rewards cannot
be trained on become unscored before TRL or a rule sees them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from ....errors import UserError, raised
from ....sandbox import RewardFailure, as_score, failure
from ....sandbox.worker import Work, no_copies
from ....selection import REWARD_LIMIT
from ....selection.types import kind_of
from ....text import plain_text, short
from .. import compat
from ..compat import TRLTrainer, get_callable_name, is_async_callable
from ..transcript import as_text

logger = logging.getLogger(__name__)
CheckedScores = list[float | RewardFailure | None]


class CheckedRewards:
    """The checked rewards of one trainer; usable rewards equal TRL's bit for bit."""

    def __init__(self, trainer: TRLTrainer) -> None:
        self._trainer = trainer
        self._warned: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        # Of one generation. Rows without a score, over the reward functions of this process:
        self._errors = 0
        self._timeouts = 0
        self._first_failures: dict[str, str] = {}  # by function
        self._unusable = [0] * len(self._trainer.reward_func_names)  # rewards of each function, over all processes

    def score(self, calculate: Callable[..., Tensor], *columns: Sequence[Any]) -> Tensor:
        """Call the trainer's `_calculate_rewards`, which a subclass may override. Call this on every process.

        Returns:
            `[rows, F]` of all processes, unusable rewards as NaN: what selects, is trained and is logged.

        Raises:
            UserError: it did not return such a tensor.
        """
        self._begin()
        trainer = self._trainer
        accelerator = trainer.accelerator
        returned: Any = calculate(*columns)
        shape = [len(columns[0]) * accelerator.num_processes, len(trainer.reward_func_names)]
        if not isinstance(returned, Tensor) or list(returned.shape) != shape:
            raise UserError(
                f"{type(trainer).__name__}._calculate_rewards returned {kind_of(returned)}; expected a tensor of "
                f"shape {shape}: a row for each rollout of all processes (trainer.accelerator.gather), and a column "
                "for each reward function."
            )
        if not returned.is_floating_point():
            returned = returned.float()
        # Cleaned again: a subclass's method may have changed what ours returned, or have called none of ours.
        rewards = self.clean(returned.detach().to(accelerator.device))
        # Count and log, over all processes, the rollouts without a score and the first failure of each function.
        unusable = sum(self._unusable)
        unscored = int(rewards.isnan().all(dim=1).sum())
        counts = torch.tensor([self._errors, self._timeouts], device=accelerator.device)
        errors, timeouts = accelerator.reduce(counts, reduction="sum").tolist()
        if errors or timeouts:
            for name, message in gather_object(list(self._first_failures.items())):
                self._warn_once(f"errors of {name}", f"{message}. Logged once; see pods/reward_errors and _timeouts.")
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        metrics["pods/unusable_rewards"].append(float(unusable))
        metrics["pods/unscored_rollouts"].append(float(unscored))
        metrics["pods/reward_errors"].append(float(errors))
        metrics["pods/reward_timeouts"].append(float(timeouts))
        for name, count in zip(trainer.reward_func_names, self._unusable, strict=True):
            self._warn_of_unscored(name, f"reward function {name!r} gave no usable reward", count, len(rewards))
        # The others are unscored because every function returned None or NaN for them.
        self._warn_of_unscored("", "no function gave a reward", unscored - unusable, len(rewards))
        return rewards

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, TRL calls checked reward functions; outside, `reward_funcs` holds the user's own objects."""
        trainer = self._trainer
        pairs = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        functions = [self._watched(function, name) for function, name in pairs]
        with compat.replacing(trainer, reward_funcs=functions):
            yield

    def _watched(self, function: Any, name: str) -> Any:
        """Return the reward function as TRL calls it in one generation; a reward model stays as it is."""
        if isinstance(function, nn.Module):
            return function

        async def call_async(**columns: Any) -> list[float | None]:
            rows = len(columns["completions"])
            outcome = await _attempt(function, columns, name, rows)
            scores: CheckedScores = []
            if not isinstance(outcome, BaseException):
                scores = outcome
            elif self._trainer.args.reward_errors == "raise":
                batch = f"for a batch of {rows} completions. {_ADVICE['raise']}"
                if isinstance(outcome, SystemExit):  # it would end the run without a word
                    raise UserError(
                        plain_text(f"reward function {name!r} raised {raised(outcome)} {batch}")
                    ) from outcome
                outcome.add_note(plain_text(f"reward function {name!r} raised this {batch}"))
                raise outcome
            else:
                # Score the rows one by one, so that only those that raise are without a score.
                for row in range(rows):
                    of_row = await _attempt(function, one_row(columns, row, rows), name, 1)
                    if isinstance(of_row, BaseException):
                        scores.append(RewardFailure(f"raised {raised(of_row)}", error=of_row))
                    else:
                        scores += of_row
            return [self._handle_failure(score, row, columns, name) for row, score in enumerate(scores)]

        def call(**columns: Any) -> list[float | None]:
            scores: list[float | None] = []
            try:
                call_async(**columns).send(None)  # it ends here: nothing in it waits for a plain function
            except StopIteration as end:
                scores = end.value
            return scores

        return call_async if is_async_callable(function) else call

    def _handle_failure(
        self, score: float | RewardFailure | None, row: int, columns: Mapping[str, Any], name: str
    ) -> float | None:
        """Handle a failure as `reward_errors` says; inf marks the rollout as unscored, since TRL reads NaN as None."""
        if not isinstance(score, RewardFailure):
            return score
        policy = self._trainer.args.reward_errors
        prompt = _short_repr(as_text(columns["prompts"][row]))
        completion = _short_repr(as_text(columns["completions"][row]))
        failed = f"reward function {name!r} {score.reason} for row {row} of {len(columns['completions'])}"
        message = f"{plain_text(failed)}, prompt {prompt}, completion {completion}. {_ADVICE[policy]}"
        if policy == "raise":
            raise UserError(message) from score.error
        if score.late:
            self._timeouts += 1
        else:
            self._errors += 1
        self._first_failures.setdefault(name, message)
        return 0.0 if policy == "zero" else math.inf

    def clean(self, rewards: Tensor) -> Tensor:
        """Return `[rows, F]` of all processes with unusable rewards as NaN, and count these."""
        usable_rewards, unusable_counts = refuse_unusable(rewards, self._trainer.reward_weights)
        for i, count in enumerate(unusable_counts.tolist()):
            self._unusable[i] += count
        return usable_rewards

    def _warn_of_unscored(self, topic: str, problem: str, count: int, rollouts: int) -> None:
        if count <= 0:
            return
        self._warn_once(
            topic,
            f"{problem} for {count} of {rollouts} rollouts (infinite, beyond {REWARD_LIMIT:g}, None, NaN, or dropped "
            "after an error); they count as unscored: never selected while scored ones remain, advantage 0. "
            "Logged once; see pods/unusable_rewards and pods/unscored_rollouts.",
        )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned and self._trainer.accelerator.is_main_process:
            self._warned.add(topic)
            logger.warning("%s", message)


def refuse_unusable(rewards_per_func: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mark rollouts whose rewards cannot be trained on as unscored: NaN in every column of `[rows, F]`.

    Infinite rewards, and rewards beyond `REWARD_LIMIT` in size, with or without their weight, turn a group's variance,
    and with it the loss, into inf or NaN. NaN means that the function does not apply, which is allowed.

    Returns:
        The cleaned rewards, and for each function the number of rollouts it made unscored, `[F]`.

    Example:
        >>> clean, spoiled = refuse_unusable(torch.tensor([[1.0, 0.0], [float("inf"), 1.0]]), torch.ones(2))
        >>> clean.tolist(), spoiled.tolist()
        ([[1.0, 0.0], [nan, nan]], [1, 0])
    """
    size = rewards_per_func.abs() * weights.to(rewards_per_func).abs().clamp(min=1.0)
    bad = size > REWARD_LIMIT  # [rows, F]; false for NaN, true for both infinities
    usable = rewards_per_func.masked_fill(bad.any(dim=1, keepdim=True), torch.nan)
    return usable, bad.sum(dim=0)


# -- one call of a reward function -----------------------------------------------------------------------------------

_ADVICE = {
    "raise": "Fix the function, or set reward_errors: zero (such rollouts score 0) or drop (they count as unscored)",
    "zero": "It scores 0 (reward_errors: zero)",
    "drop": "It counts as unscored (reward_errors: drop)",
}


async def _attempt(
    function: Any, columns: Mapping[str, Any], name: str, rows: int
) -> CheckedScores | Exception | SystemExit:
    """Return the checked scores of a call, or the exception that the function raised."""
    try:
        with no_copies():
            returned = function(**columns)
            return check_scores(await returned if is_async_callable(function) else returned, name, rows)
    except UserError:  # of `check_scores`
        raise
    except (Exception, SystemExit) as error:  # SystemExit, which would end the run without a word
        return error


def one_row(columns: Mapping[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Return the arguments of a call for one row; its logs are dropped, since the first call logged them."""
    arguments: dict[str, Any] = {}
    for key, values in columns.items():
        is_column = isinstance(values, list) and len(values) == rows
        arguments[key] = [values[row]] if is_column else values
    # A column of one value is none of the batch's.
    arguments["log_extra"] = lambda *_: None
    arguments["log_metric"] = lambda *_: None
    return arguments


def check_scores(returned: Any, name: str, rows: int) -> CheckedScores:
    """Return a function's scores as floats, None if it does not apply, and RewardFailure if there is no score.

    Takes lists, tuples and one-dimensional arrays of real numbers (`as_score`); booleans count as 0 and 1.

    Raises:
        UserError: anything else, with what the function returned and what was expected.

    >>> check_scores([1, None, True], "f", 3)
    [1.0, None, 1.0]
    >>> check_scores([0.5, "1"], "f", 2)
    Traceback (most recent call last):
    pods_rl.errors.UserError: reward function 'f' gave '1' (str) for row 1; expected a list of 2 floats, ...
    """

    def refuse(description: str) -> UserError:
        return UserError(
            f"reward function {plain_text(name)!r} gave {description}; expected a list of {rows} floats, one per "
            "completion (None if it does not apply). Nothing was trained on it: fix the function's return value"
        )

    if hasattr(returned, "tolist") and hasattr(returned, "shape"):  # an array or a tensor of any library
        if len(returned.shape) != 1:
            raise refuse(f"a {type(returned).__name__} of shape {list(returned.shape)}")
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
        raise refuse(kind_of(returned))
    if len(returned) != rows:
        raise refuse(f"{kind_of(returned)} of {len(returned)}")
    scores: CheckedScores = []
    for row, value in enumerate(returned):
        try:
            scores.append(value if isinstance(value, RewardFailure) else as_score(value))
        except TypeError:
            raise refuse(f"{_short_repr(value)} ({type(value).__name__}) for row {row}") from None
    return scores


def _short_repr(value: Any) -> str:
    """Return a value for a message: short, and harmless in a terminal."""
    if isinstance(value, str):
        return plain_text(repr(short(value, 80)))  # cut before its quotes are added
    return plain_text(short(repr(value), 80))


# -- reward functions in forked children, which are killed at a timeout -----------------------------------------------

AT_ONCE = 4  # children that share single rows


def killable(function: Callable[..., Any], seconds: float) -> Callable[..., CheckedScores]:
    """Return a reward function in TRL's signature, for PODSTrainer, that cannot hang the run.

    Each batch is scored in a forked child of this process, which is killed after half of `seconds` of wall time. If it
    raises or is killed, each row is scored alone, in four children, with the other half of the time; a row without a
    score is then handled as PODSConfig's `reward_errors` says. A batch with one row that hangs takes `seconds`.

    The function must keep no state between calls, and cannot use the GPU, as no forked process can. `log_extra` and
    `log_metric` reach the trainer. Each row may be scored a second time. Its child processes end with it, its
    standard input is empty, and an exception reaches the trainer as text.

    Raises:
        UserError: an async function or a reward model, or a limit that is not above 0.

    >>> async def judge(completions, **_): ...
    >>> killable(judge, seconds=5)
    Traceback (most recent call last):
    pods_rl.errors.UserError: killable takes a plain reward function, got a function that is async or a model...
    """
    if isinstance(function, nn.Module) or is_async_callable(function):
        raise UserError(
            f"killable takes a plain reward function, got a {type(function).__name__} that is async or a model: "
            "give it a limit of its own (asyncio.wait_for)"
        )
    if not seconds > 0:
        raise UserError(f"killable needs a limit above 0 seconds: got {seconds!r}")

    name = get_callable_name(function)
    limit = seconds / 2  # for the batch, and again for single rows

    @functools.wraps(function)
    def killed(**columns: Any) -> CheckedScores:
        from ....sandbox.pool import WorkerPool

        # torch's threads are the parent's, and do not exist in a child that is forked.
        work = Work(functools.partial(_in_child, function, name, columns), prepare=lambda: torch.set_num_threads(1))
        pool = WorkerPool(AT_ONCE, work, runs_user_code=True, name=name)
        try:
            replies = pool.ask([None], limit)  # None: all rows in one call
            batch_reply = replies[0]
            if batch_reply.kind not in ("gave", "refused"):
                replies = pool.ask(range(len(columns["completions"])), limit)
        finally:
            pool.close()
        for reply in replies:
            if reply.kind == "refused":  # a return value that is wrong whatever the rows are
                raise UserError(reply.value)
        if batch_reply.kind != "gave":  # single rows log nothing, since a batch's columns are of all rows
            return [reply.value["scores"][0] if reply.kind == "gave" else failure(reply, limit) for reply in replies]
        for log in ("log_extra", "log_metric"):
            for arguments in batch_reply.value[log]:
                columns[log](*arguments)
        return batch_reply.value["scores"]

    killed.__name__ = name  # of a partial or an object too
    return killed


def _in_child(function: Callable[..., Any], name: str, columns: Mapping[str, Any], row: int | None) -> dict[str, Any]:
    """In the child: return the scores of one row, or (None) of all, and what was logged."""
    logged: dict[str, list[Any]] = {"log_extra": [], "log_metric": []}
    arguments = dict(columns) if row is None else one_row(columns, row, len(columns["completions"]))
    arguments["log_extra"] = lambda *values: logged["log_extra"].append(values)
    arguments["log_metric"] = lambda *values: logged["log_metric"].append(values)
    scores = function(**arguments)
    return {"scores": check_scores(scores, name, len(arguments["completions"])), **logged}
