"""What the benchmarks share: tables, a quiet trainer, arms that take turns, a ratio with its spread, and memory."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Arm = TypeVar("Arm")
Result = TypeVar("Result")


# ------------------------------------------------------------------------------------------- commands and tables


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a benchmark's docstring as its help, line by line."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table if `--csv` was given."""
    if path is None:
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


# ------------------------------------------------------------------------------------------- a quiet run


def set_up_torch(threads: int) -> None:
    """Set the number of threads, and silence transformers' warnings and progress bars."""
    import torch
    from transformers import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def quiet(trainer: Any) -> Any:
    """Return the trainer without the metric dictionaries that transformers prints if it has no progress bar."""
    from transformers import PrinterCallback, logging

    logging.set_verbosity_error()
    trainer.remove_callback(PrinterCallback)
    return trainer


# ------------------------------------------------------------------------------------------- times


def alternate(arms: Mapping[str, Arm], repeats: int, measure: Callable[[Arm, int], Result]) -> dict[str, list[Result]]:
    """Measure every arm once in each repeat; return the results of each arm by repeat.

    The machine's slow moments then reach all arms alike, so a ratio within a repeat varies less than the times do.
    Every second repeat takes the arms in reverse order.

    Args:
        measure: receives an arm and the number of the repeat.

    >>> alternate({"first": 1, "second": 10}, 3, lambda arm, repeat: arm + repeat)
    {'first': [1, 2, 3], 'second': [10, 11, 12]}
    """
    results: dict[str, list[Result]] = {name: [] for name in arms}
    order = list(arms)
    for repeat in range(repeats):
        for name in order:
            results[name].append(measure(arms[name], repeat))
        order.reverse()
    return results


def ratios(seconds: Iterable[float], base_seconds: Iterable[float]) -> list[float]:
    """Return the ratio of each repeat."""
    return [first / second for first, second in zip(seconds, base_seconds, strict=True)]


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    """Return the median and, in brackets, the least and the greatest.

    >>> spread([1.0, 2.0, 4.0])
    '2.00 (1.00-4.00)'
    """
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}-{max(values):{digits}})"


# ------------------------------------------------------------------------------------------- memory


def tensor_peak(work: Callable[[], Any]) -> int:
    """Return the bytes of tensors at the peak, above what was held."""
    import torch

    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return peak_of(profile)


def peak_of(profile: Any) -> int:
    """Return the peak of a profile with `profile_memory=True` in bytes: the highest sum of the allocator's events."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def resident_memory() -> int:
    """Return the resident bytes of this process."""
    return _status("VmRSS")


def peak_memory() -> int:
    """Return the peak resident bytes since this process began, or since `reset_peak_memory`."""
    return _status("VmHWM")


def reset_peak_memory() -> bool:
    """Reset the peak to what is resident now; return False if the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
