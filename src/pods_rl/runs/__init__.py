"""The run directory: plain files, written so that a kill at any moment leaves them readable.

Does not import torch. The table of files and fields is in ``docs/architecture.md`` ("Run directory").
"""

from .files import read_jsonl, to_json, write_atomic, write_parquet
from .record import Record
from .run import (
    Run,
    RunInUseError,
    RunWriter,
    check_unused,
    end_run,
    find_runs,
    is_run,
    last_clocks,
    not_begun,
    undeclared_runs,
)

__all__ = [
    "Record",
    "Run",
    "RunInUseError",
    "RunWriter",
    "check_unused",
    "end_run",
    "find_runs",
    "is_run",
    "last_clocks",
    "not_begun",
    "read_jsonl",
    "to_json",
    "undeclared_runs",
    "write_atomic",
    "write_parquet",
]
