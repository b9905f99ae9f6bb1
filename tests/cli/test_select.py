"""`pods select`: worked rows, bad lines, groups of any size, every type of value, and files that it must not touch."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pods_rl.cli import app
from pods_rl.cli.compare import TABLES
from pods_rl.errors import UserError
from pods_rl.runs import write_parquet


def select(*words: object, stdin: str | None = None):
    result = CliRunner().invoke(app, ["select", *map(str, words)], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def rollouts(group, rewards):
    return [{"prompt": group, "reward": reward, "id": f"{group}{i}"} for i, reward in enumerate(rewards)]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "r.jsonl", rollouts("a", [1, 2, 3]))


# -- selection --------------------------------------------------------------------------------------------------------


def test_the_extremes_of_each_group_are_kept_in_the_files_order(tmp_path):
    rows = rollouts("a", [3, 1, 2, 6, 5, 4]) + rollouts("b", [0, 0, 1, 0])
    mixed = rows[::2] + rows[1::2]
    result = select(write(tmp_path / "r.jsonl", mixed), "-m", 2, "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    by_id = {row["id"]: row for row in kept}
    assert {"a1", "a3", "b2"} < set(by_id)
    assert len(kept) == 4
    assert [row["id"] for row in kept] == [row["id"] for row in mixed if row["id"] in by_id]
    assert (by_id["a3"]["selected_rank"], by_id["a1"]["selected_rank"]) == (1, 2)
    assert by_id["a3"]["advantage"] == pytest.approx(2.5 / (12.5**0.5 + 1e-4))  # 1 and 6, ddof = 1
    assert by_id["a1"]["advantage"] == -by_id["a3"]["advantage"]
    assert "2 groups, 0 with equal rewards" in result.output


def test_advantages_before_selection_use_all_of_the_group(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [0, 1, 1, 1]))
    select(source, "-m", 2, "--advantages", "before", "--output", tmp_path / "k.jsonl")
    assert {round(row["advantage"], 2) for row in rows_of(tmp_path / "k.jsonl")} == {-1.5, 0.5}


def test_groups_may_be_small_and_of_any_value_and_rewards_true_or_null(tmp_path):
    rows = [{"g": {"id": [1]}, "score": score} for score in (None, True, False, 0.5)]
    rows += [{"g": 1, "score": 1}, {"g": "1", "score": 2}, {"g": 2, "score": None}, {"g": 2, "score": 1}]
    source = write(tmp_path / "r.jsonl", rows)
    result = select(source, "-m", 2, "--group-by", "g", "--reward_key", "score", "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    assert [row["score"] for row in kept] == [True, False, 1, 2, None, 1]
    assert [row["selected_rank"] for row in kept] == [1, 2, 1, 1, 2, 1]  # an unscored row ranks last
    assert kept[4]["advantage"] == 0
    assert "2 groups of fewer than 2 rows" in result.output


def test_a_random_rule_is_seeded(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", range(50)))

    def ids(seed):
        select(source, "-m", 5, "--rule", "random", "--seed", seed, "--output", tmp_path / "k.jsonl")
        return [row["id"] for row in rows_of(tmp_path / "k.jsonl")]

    assert ids(1) == ids(1) != ids(2)


def test_huge_rewards_have_advantages(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [1e308, -1e308, 1e308, 1e308, -0.0]))
    select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert [row["advantage"] for row in rows_of(tmp_path / "k.jsonl")] == pytest.approx([0.5**0.5, -(0.5**0.5)])


# -- reading ----------------------------------------------------------------------------------------------------------

REWARD = '{{"prompt": 1, "reward": {}}}'
BAD = [
    ("x", "is not JSON"), ("[1]", "is not a JSON object"), ('{"prompt": 1}', "no key 'reward'"),
    ('{"reward": 1}', "no key 'prompt'"), ("[" * 20_000, "is n"),
    ('{"prompt": ' + "[" * 250 + "1" + "]" * 250 + ', "reward": 1}', "nested too deeply"),
    (REWARD.format('"0.5"'), "'0.5'"), (REWARD.format("-Infinity"), "-inf"), (REWARD.format("1e400"), "inf"),
    (REWARD.format("1" * 400), "finite"), (REWARD.format("1" * 5000), "not JSON"), (REWARD.format("[1]"), "finite"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
def test_bad_lines_are_named_and_nothing_is_written(tmp_path, line, message):
    source = write(tmp_path / "r.jsonl", [*rollouts("a", [1]), line, *rollouts("a", [2, 3])])
    with pytest.raises(UserError, match=f"line 2: .*{message}") as error:
        select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert len(str(error.value)) < 500
    assert not (tmp_path / "k.jsonl").exists()
    result = select(source, "-m", 2, "--output", tmp_path / "k.jsonl", "--skip-bad")
    assert [row["reward"] for row in rows_of(tmp_path / "k.jsonl")] == [1, 3]
    assert "1 bad line skipped" in result.output


def test_only_ten_of_many_bad_lines_are_shown(tmp_path):
    with pytest.raises(UserError, match=r"(?s)25 bad lines.*line 10: .*and 15 more$"):
        select(write(tmp_path / "r.jsonl", ["x"] * 25))


def test_bytes_that_are_not_utf8_are_named_and_a_bom_and_line_separators_are_read(tmp_path):
    source, line = tmp_path / "r.jsonl", '{"prompt": "é\u2028", "reward": 1}'
    source.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n" + line.encode("latin-1", "replace") + b"\r\n")
    with pytest.raises(UserError, match=r"line 2: is not UTF-8 text \(byte 0xe9 at position 13\)"):
        select(source)
    select(source, "--skip-bad", "--output", tmp_path / "k.jsonl")
    assert rows_of(tmp_path / "k.jsonl")[0]["prompt"] == "é\u2028"


def test_a_line_without_end_is_refused(source, monkeypatch):
    monkeypatch.setattr("pods_rl.cli.rows._LONGEST_LINE", 20)
    with pytest.raises(UserError, match="line 1 has 20 bytes or more"):
        select(source, "--skip-bad")


def test_mistakes_are_refused(tmp_path, source):
    for words, message in {
        (source, "--rule", "max_varience"): "[Dd]id you mean .?max_variance",
        (source, "--advantages", "during"): "during",
        (tmp_path / "gone",): "No such file", (write(tmp_path / "empty", [" "]),): "holds no rollouts",
        (tmp_path,): "holds no Parquet file",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=message):
            select(*words, "-m", 2)
    assert select(source, "-m", 0).exit_code == select(source, "--seed", -1).exit_code == 2


def test_rows_of_a_ledger_are_read_as_its_json_would_be(tmp_path):
    rows = rollouts("a", [1, 2, 3]) + rollouts("b", [0.0, None, float("nan")])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["turn_rewards"] = [None, [0.5], [0.0, float("nan")]] * 2
    for row, turns in zip(rows, [None, [0.5], [0.0, None]] * 2, strict=True):
        row["turn_rewards"] = turns
    select(write(tmp_path / "r.jsonl", rows), "-m", 2, "--output", tmp_path / "j.jsonl")
    one = write_parquet(tmp_path / "rollouts" / "step-000001.parquet", columns)
    select(one, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert rows_of(tmp_path / "k.jsonl") == rows_of(tmp_path / "j.jsonl")
    write_parquet(tmp_path / "rollouts" / "step-000002.parquet", columns)
    result = select(one.parent, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert rows_of(tmp_path / "k.jsonl") == 2 * rows_of(tmp_path / "j.jsonl")
    assert "4 groups" in result.output  # a prompt of two steps is two groups
    one.write_bytes(one.read_bytes()[:-9])
    with pytest.raises(UserError, match="is not a complete Parquet file"):
        select(one)


# -- every type of value ----------------------------------------------------------------------------------------------

DAY = datetime.date(2026, 1, 2)
VALUES = {
    "date": (DAY, "2026-01-02"),
    "time": (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), "2026-01-02T03:04:05.000006"),
    "decimal": (decimal.Decimal("0.50"), 0.5),
    "long decimal": (decimal.Decimal("0.12345678901234567891"), None),
    "NaN": (float("nan"), [None]),
    "infinity": (float("inf"), None),
    "bytes": (b"\x89PNG", None),
    "bytes in a struct in a list": ([{"path": "a", "bytes": b"\x89PNG"}], None),
    "a struct": ({"a": {"b": DAY}}, {"a": {"b": "2026-01-02"}}),
    "a duration": (datetime.timedelta(1), None),
}


@pytest.mark.parametrize("name", VALUES)
def test_jsonl_holds_a_value_exactly_or_is_refused_and_parquet_keeps_its_type(tmp_path, name):
    value, expected = VALUES[name]
    source = tmp_path / "r.parquet"
    table = pa.table({"prompt": ["a"] * 3, "reward": pa.array([1, 2, 3], pa.float32()), "x": [value] * 3})
    pq.write_table(table, source)
    if expected is None:
        with pytest.raises(UserError, match=r"x.* holds .*Write Parquet"):
            select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
        assert not (tmp_path / "k.jsonl").exists()
    else:
        select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
        assert rows_of(tmp_path / "k.jsonl")[0]["x"] == (None if name == "NaN" else expected)
    select(source, "-m", 2, "--output", tmp_path / "k.parquet")
    kept = pq.read_table(tmp_path / "k.parquet")
    assert kept.schema.field("x").type == table.schema.field("x").type
    assert kept.schema.field("reward").type == pa.float32()
    assert repr(kept["x"].to_pylist()) == repr([value] * 2)


def test_dictionaries_maps_and_decimal_rewards_are_read(tmp_path):
    words = pa.array(["a", "a", "a"]).dictionary_encode()
    maps = pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int8()))
    rewards = pa.array([decimal.Decimal(text) for text in ("0.1", "0.2", "0.3")])
    pq.write_table(pa.table({"prompt": words, "reward": rewards, "map": maps}), tmp_path / "r.parquet")
    select(tmp_path / "r.parquet", "-m", 2, "--output", tmp_path / "k.jsonl")
    assert [(row["reward"], row["map"]) for row in rows_of(tmp_path / "k.jsonl")] == [
        (0.1, [["k", 1]]),
        (0.3, [["k", 1]]),
    ]
    select(tmp_path / "r.parquet", "-m", 2, "--output", tmp_path / "k.parquet")
    assert pq.read_table(tmp_path / "k.parquet")["map"].type == maps.type


@pytest.mark.parametrize("values", [(1, "1"), ({}, {}), ({"a": {}}, None), (2**70, 1)], ids=str)
def test_what_parquet_cannot_hold_is_refused(tmp_path, values):
    source = write(tmp_path / "r.jsonl", [{"prompt": "a", "reward": i, "x": value} for i, value in enumerate(values)])
    with pytest.raises(UserError, match=r"Parquet cannot hold .*Write JSONL"):
        select(source, "--output", tmp_path / "k.parquet")
    assert not (tmp_path / "k.parquet").exists()


def test_parquet_is_written_with_every_column_and_read_again(tmp_path):
    rows = [{**row, "source": {"book": 1}} for row in rollouts("a", [3, 1, 2])] + rollouts("b", [1, 0, 1])
    source = write(tmp_path / "r.jsonl", rows)
    for name in ("k.parquet", "k.jsonl"):
        select(source, "-m", 2, "--output", tmp_path / name)
    table = pq.read_table(tmp_path / "k.parquet").to_pylist()
    plain = [{key: value for key, value in row.items() if value is not None} for row in table]
    assert plain == rows_of(tmp_path / "k.jsonl")
    assert "2 groups" in select(tmp_path / "k.parquet", "-m", 1).output


# -- where it writes --------------------------------------------------------------------------------------------------


def test_the_input_is_never_written_by_any_path_or_link(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    before = source.read_bytes()
    for output in (source, "r.jsonl", "../" + tmp_path.name + "/r.jsonl", "link", "hard"):
        with pytest.raises(UserError, match="is the input"):
            select(source, "-m", 1, "--output", output, "--force")
    with pytest.raises(UserError, match="is the input"):
        select("link", "-m", 1, "--output", source, "--force")
    assert source.read_bytes() == before
    ledger = write_parquet(tmp_path / "rollouts" / "step-000001.parquet", {"prompt": ["a"], "reward": [1.0]}).parent
    with pytest.raises(UserError, match="is in the directory"):
        select(ledger, "--output", ledger / "kept.parquet", "--force")


@pytest.mark.parametrize("name", ["k.jsonl", "k.parquet"])
def test_a_file_of_somebody_else_is_replaced_only_with_force_and_its_own_always(tmp_path, source, name):
    output = tmp_path / name
    output.write_text("mine")
    with pytest.raises(UserError, match="--force"):
        select(source, "-m", 2, "--output", output)
    assert output.read_text() == "mine"
    select(source, "-m", 2, "--output", output, "--force")
    assert "3 " in select(source, "-m", 1, "--output", output).output
    assert "1 group," in select(output, "-m", 1).output


def test_a_place_that_cannot_be_written_is_refused_before_reading(tmp_path, source):
    for output in ("", ".", tmp_path):
        with pytest.raises(UserError, match="is a directory: give a file"):
            select(tmp_path / "gone", "--output", output)
    with pytest.raises(UserError, match="its directory does not exist"):
        select(tmp_path / "gone", "--output", tmp_path / "no" / "k.jsonl")
    assert "Nothing written" in select(source, "-m", 2).output
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk_is_one_line(source):
    with pytest.raises(UserError, match="No space left"):
        select(source, "-m", 2, "--output", "/dev/full")


@pytest.mark.parametrize("name", ["pipe", "pipe.parquet"])
def test_a_pipe_is_written_to(tmp_path, source, name):
    os.mkfifo(tmp_path / name)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / name).read_bytes()), daemon=True)
    reader.start()
    select(source, "-m", 2, "--output", tmp_path / name)
    reader.join(timeout=60)
    rows = pq.read_table(io.BytesIO(read[0])).num_rows if name.endswith("parquet") else len(read[0].splitlines())
    assert rows == 2


def test_it_is_a_filter(monkeypatch):
    lines = "".join(json.dumps(row) + "\n" for row in rollouts("a", [1, 2, 3]))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    result = select("-", "-m", 2, "--output", "-", stdin=lines)
    assert [json.loads(line)["reward"] for line in result.stdout.splitlines()] == [1, 3]
    assert "1 group," in result.stderr


@pytest.fixture
def sets(monkeypatch):
    """Replaces the hub's data sets by local ones: `load_dataset` and `push_to_hub` of the data sets library."""
    import datasets

    from pods_rl.recipe import available

    there = {"me/rollouts": datasets.Dataset.from_list([*rollouts("a", [3, 1, 2]), {"prompt": "a", "reward": None}])}

    def load(name, split):
        if name not in there or split != "train":
            raise ValueError(f"no {name} with {split}")
        return there[name]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.Dataset, "push_to_hub", lambda self, name, split: there.update({name: self}))
    monkeypatch.setattr(available, "check_pushable", lambda key: None)
    return there


def test_data_sets_of_the_hub_are_read_and_written(sets):
    select("hf://me/rollouts", "-m", 2, "--output", "hf://datasets/me/kept")
    assert sets["me/kept"]["id"] == ["a0", "a1"]
    assert sets["me/kept"]["selected_rank"] == [1, 2]
    for words, message in {
        ("hf://me/gone",): "no me/gone", ("hf://me/rollouts", "--split", "test"): "cannot read split test",
        ("hf://me/a/b",): "hf://owner/name", ("hf://me/rollouts", "--output", "hf://a b"): "expected a data set",
        ("me/rollouts",): "give hf://me/rollouts",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=message):
            select(*words)


def test_a_report_replaces_neither_its_csv_nor_files_of_another(tmp_path):
    def report(csv, folder, *words):
        words = ["report", "--csv", csv, "--output", folder, "--metric", "score", *words]
        result = CliRunner().invoke(app, list(map(str, words)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception

    rows = "arm,run,hours,score\n" + "".join(f"grpo,{run},{hour},0.{hour}\n" for run in (1, 2) for hour in (1, 2, 3))
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "e.csv").write_text(rows)
    (folder / "final.csv").write_text("mine")
    with pytest.raises(UserError, match="--force"):
        report(tmp_path / "e.csv", folder)
    assert (folder / "final.csv").read_text() == "mine"
    report(tmp_path / "e.csv", folder, "--force")
    report(tmp_path / "e.csv", folder)  # a folder of its own
    assert {path.stem for path in folder.glob("*.csv")} <= set(TABLES)
    (folder / "final.csv").write_text(rows)
    with pytest.raises(UserError, match="is the input"):
        report(folder / "final.csv", folder, "--force")
