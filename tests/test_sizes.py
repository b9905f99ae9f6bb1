"""Files of a few kilobytes that hold gigabytes are refused with their size before they are decoded."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pods_rl.cli.select import read_rollouts
from pods_rl.errors import UserError
from pods_rl.report.ledger import Ledger
from pods_rl.runs import sizes
from pods_rl.runs.sizes import check_size
from pods_rl.tasks import load_task, sources

CELL = "x" * 200_000
ROWS = 20_000


def repeated(rows: int = ROWS, cell: str = CELL) -> pa.Array:
    """A column of one long value, which the file holds once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([cell]))


def in_lists(rows: int = ROWS) -> pa.Array:
    messages = pa.StructArray.from_arrays([repeated(rows)], ["content"])
    return pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), messages)


def write(path: Path, **columns: pa.Array) -> Path:
    rows = len(next(iter(columns.values())))
    numbers = pa.array([str(row) for row in range(rows)])
    pq.write_table(pa.table({"question": numbers, "answer": numbers, **columns}), path, compression="zstd")
    assert path.stat().st_size < 200_000
    return path


LARGE = {
    "a repeated value": lambda path: write(path, question=repeated()),
    "a repeated value in lists": lambda path: write(path, question=in_lists()),
    "a compressed value": lambda path: write(path, question=pa.array(["x" * 9_000_000])),
    "many small rows": lambda path: write_numbers(path, 90_000),
}


def write_numbers(path: Path, rows: int) -> Path:
    pq.write_table(pa.table({"reward": pa.nulls(rows, pa.int8())}), path)
    return path


@pytest.mark.parametrize("kind", LARGE)
def test_a_small_file_of_large_values_is_refused_with_its_size(tmp_path: Path, monkeypatch, kind: str) -> None:
    monkeypatch.setattr(sizes, "_ALLOWED", 8_000_000)
    path = LARGE[kind](tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet .* KB .* MB") as refused:
        check_size(path)
    assert "\n" not in str(refused.value)


def test_repeated_values_within_the_limit_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", question=repeated(100, "1 + 1 = ?"), reward=pa.array([1.0] * 100))
    check_size(path)
    assert len(read_rollouts(str(path), "answer", "reward")) == 100


@pytest.mark.parametrize("where", ["file", "folder", "select", "report"])
def test_every_reader_of_the_users_files_refuses_it(tmp_path: Path, where: str) -> None:
    path = write(tmp_path / "train.parquet", question=repeated(), prompt=repeated(), reward=pa.array([1.0] * ROWS))
    read = {
        "file": lambda: load_task({"dataset_name": str(path)}),
        "folder": lambda: load_task({"dataset_name": str(tmp_path)}),
        "select": lambda: read_rollouts(str(path), "prompt", "reward"),
        "report": lambda: Ledger().read(path, None, "run"),
    }
    with pytest.raises(UserError, match=r"\d MB"):
        read[where]()


@pytest.mark.parametrize("ending", ["gz", "zip"])
def test_compressed_text_is_measured_before_it_is_decoded(tmp_path: Path, monkeypatch, ending: str) -> None:
    monkeypatch.setattr(sizes, "_ALLOWED", 1_000_000)
    text = b'{"question": "1+1?", "answer": "2"}\n' + b" " * 2_000_000
    path = tmp_path / f"train.jsonl.{ending}"
    if ending == "gz":
        path.write_bytes(gzip.compress(text))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("train.jsonl", text)
    monkeypatch.setattr(sources, "load_dataset_builder", None)  # nothing decodes it
    monkeypatch.setattr(sources, "get_dataset_split_names", None)
    with pytest.raises(UserError, match=r"train\.jsonl\.\w+ .* MB"):
        load_task({"dataset_name": str(tmp_path)})


def test_a_file_that_changed_is_measured_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", question=repeated(100))
    check_size(path)
    write(path, question=repeated())
    with pytest.raises(UserError):
        check_size(path)


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), pa.ArrowMemoryError("malloc of size 9 failed")])
def test_out_of_memory_is_not_a_damaged_file(tmp_path: Path, monkeypatch, error: Exception) -> None:
    path = write(tmp_path / "rows.parquet", question=repeated(100, "1+1?"))

    def no_memory(*_, **__):
        raise error

    monkeypatch.setattr("pods_rl.tasks.sources.load_dataset", no_memory)
    with pytest.raises(UserError, match="memory"):
        load_task({"dataset_name": str(path)})
    monkeypatch.setattr("pods_rl.cli.select.parquet_rows", no_memory)
    with pytest.raises(UserError, match="memory"):
        read_rollouts(str(path), "question", "reward")
