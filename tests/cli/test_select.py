"""`pods select`: worked rows, bad lines, groups of any size, and files that it must not touch."""

import json
import os
import subprocess
import sys

import pytest
import torch

from pods_rl.errors import UserError
from pods_rl.runs import write_parquet

from . import pods


def select(*words: object):
    return pods("select", *words)


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
    assert "2 groups" in result.output


def test_groups_may_be_small_and_of_any_value_and_rewards_true_or_null(tmp_path):
    rows = [{"g": {"id": [1]}, "score": score} for score in (None, True, False, 0.5)]
    rows += [{"g": 1, "score": 1}, {"g": "1", "score": 2}, {"g": 2, "score": None}, {"g": 2, "score": 1}]
    source = write(tmp_path / "r.jsonl", rows)
    result = select(source, "-m", 2, "--group-by", "g", "--reward_key", "score", "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    assert [row["score"] for row in kept] == [True, False, 1, 2, None, 1]
    assert [row["selected_rank"] for row in kept] == [1, 2, 1, 1, 2, 1]  # an unscored row ranks last
    assert kept[4]["advantage"] == 0
    assert "fewer" in result.output


def test_a_batch_keeps_different_numbers_of_its_groups(tmp_path):
    """1 and 0 of b are worth more than a second pair of c; a has equal rewards, d a single row."""
    rows = rollouts("a", [1, 1, 1, 1]) + rollouts("b", [0, 2, 0, 2]) + rollouts("c", [1, 0, 1, 0]) + rollouts("d", [5])
    mixed = rows[::2] + rows[1::2]
    source = write(tmp_path / "r.jsonl", mixed)
    result = select(source, "--selection", "batch", "--rows", 6, "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    by_id = {row["id"]: row for row in kept}
    assert set(by_id) == {"b0", "b1", "b2", "b3", "c0", "c1"}
    assert [row["id"] for row in kept] == [row["id"] for row in mixed if row["id"] in by_id]
    assert (by_id["c0"]["selected_rank"], by_id["c1"]["selected_rank"]) == (1, 2)
    assert by_id["c0"]["advantage"] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))  # 1 and 0, ddof = 1
    assert sorted(by_id[f"b{i}"]["selected_rank"] for i in range(4)) == [1, 2, 3, 4]
    assert "kept 6 rows" in result.output
    assert "4 groups, 2 without kept rows" in result.output
    select(source, "--selection", "batch", "-m", 1, "--output", tmp_path / "k.jsonl")  # 4 groups x 1
    assert {row["id"] for row in rows_of(tmp_path / "k.jsonl")} == {"b0", "b1", "b2", "b3"}
    select(source, "--selection", "batch", "--output", tmp_path / "k.jsonl")  # fewer are live than 4 x 16
    assert len(rows_of(tmp_path / "k.jsonl")) == 8


def test_each_parquet_file_is_a_batch(tmp_path):
    rows = rollouts("a", [1.0, 0.0, 1.0, 0.0]) + rollouts("b", [1.0, 1.0, 1.0, 1.0])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for step in (1, 2):
        write_parquet(tmp_path / "rollouts" / f"step-{step}.parquet", columns)
    write_parquet(tmp_path / "rollouts" / "step-3.parquet", {name: values[:1] for name, values in columns.items()})
    select(tmp_path / "rollouts", "--selection", "batch", "--rows", 4, "--output", tmp_path / "k.jsonl")
    assert [row["id"] for row in rows_of(tmp_path / "k.jsonl")] == 2 * ["a0", "a1", "a2", "a3"]  # none of a single row


def last_places(batch):
    """A batch rule that also keeps unscored rollouts."""
    return torch.arange(batch.rewards.numel())[-batch.rows :]


def test_a_rule_cannot_keep_what_a_shorter_group_is_filled_up_with(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [1, 2, 3, 4]) + rollouts("b", [1, 2]))
    words = ["--selection", "batch", "-m", 2, "--rule", f"{__name__}:last_places", "--output", tmp_path / "k.jsonl"]
    select(source, *words)
    assert [row["id"] for row in rows_of(tmp_path / "k.jsonl")] == ["b0", "b1"]


# -- reading ----------------------------------------------------------------------------------------------------------

REWARD = '{{"prompt": 1, "reward": {}}}'
BAD = [
    ("x", "JSON"), ("[1]", "JSON"), ('{"prompt": 1}', "'reward'"), ('{"reward": 1}', "'prompt'"),
    ("[" * 20_000, "JSON"), (REWARD.format("1" * 5000), "JSON"), (REWARD.format('"0.5"'), "'0.5'"),
    (REWARD.format("-Infinity"), "-inf"), (REWARD.format("1e16"), "1e+16"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, message):
    source = write(tmp_path / "r.jsonl", [*rollouts("a", [1]), line, *rollouts("a", [2, 3])])
    with pytest.raises(UserError, match=r"r\.jsonl\b.* 2") as refusal:
        select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 700
    assert not (tmp_path / "k.jsonl").exists()


def test_mistakes_are_refused(tmp_path, source):
    for words, message in {
        (source, "--rule", "max_varience"): "max_variance",
        (source, "--advantages", "during"): "during",
        (source, "--selection", "all"): "prompt or batch",
        (source, "--rows", 2): "--selection batch",
        (source, "--selection", "batch", "--rows", 4): "--rows 4 .* 3 rollouts",
        (tmp_path / "gone",): "No such file",
        (write(tmp_path / "empty", [" "]),): "rollouts",
        (tmp_path,): "Parquet",
    }.items():
        with pytest.raises(UserError, match=message):
            select(*words, "-m", 2)
    assert select(source, "-m", 0).exit_code == 2
    assert select(source, "--seed", -1).exit_code == 2
    assert select(source, "--selection", "batch", "--rows", 1).exit_code == 2


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
    with pytest.raises(UserError, match="Parquet"):
        select(one)


# -- where it writes --------------------------------------------------------------------------------------------------


def test_the_input_is_never_written_by_any_path_or_link(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    before = source.read_bytes()
    for given, output in ((source, source), (source, "link"), (source, "hard"), ("link", source)):
        with pytest.raises(UserError, match="input"):
            select(given, "-m", 1, "--output", output, "--force")
    assert source.read_bytes() == before


def test_a_file_of_somebody_else_is_replaced_only_with_force_and_its_own_always(tmp_path, source):
    output = tmp_path / "k.jsonl"
    output.write_text("mine")
    with pytest.raises(UserError, match="--force"):
        select(source, "-m", 2, "--output", output)
    assert output.read_text() == "mine"
    select(source, "-m", 2, "--output", output, "--force")
    select(source, "-m", 1, "--output", output)
    printed = select(output, "-m", 1).output
    assert "1 group," in printed
    assert "equal" not in printed  # as the advantage of a single row is 0


def test_a_place_that_cannot_be_written_is_refused_before_reading(tmp_path, source):
    with pytest.raises(UserError, match="directory"):
        select(tmp_path / "gone", "--output", tmp_path)
    with pytest.raises(UserError, match=r"no.k\.jsonl"):
        select(tmp_path / "gone", "--output", tmp_path / "no" / "k.jsonl")
    with pytest.raises(UserError, match="/dev/full"):
        select(source, "-m", 2, "--output", "/dev/full")
    select(source, "-m", 2)
    assert list(tmp_path.iterdir()) == [source]


def test_it_is_a_filter():
    lines = "".join(json.dumps(row) + "\n" for row in rollouts("a", [1, 2, 3]))
    words = [sys.executable, "-m", "pods_rl", "select", "-", "-m", "2", "--output", "-"]
    done = subprocess.run(words, input=lines, capture_output=True, text=True, check=True)
    assert [json.loads(line)["reward"] for line in done.stdout.splitlines()] == [1, 3]
    assert "1 group," in done.stderr
