"""`pods select`: worked rows, bad lines, and groups of any size."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pods_rl.cli import app
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


def test_the_extremes_of_each_group_are_kept_in_the_files_order(tmp_path):
    rows = rollouts("a", [3, 1, 2, 6, 5, 4]) + rollouts("b", [0, 0, 1, 0])
    mixed = rows[::2] + rows[1::2]
    source = write(tmp_path / "r.jsonl", mixed)
    result = select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    assert {row["id"] for row in kept} == {"a1", "a3", "b2", *({"b0", "b1", "b3"} & {row["id"] for row in kept})}
    assert len(kept) == 4
    assert [row["id"] for row in kept] == [row["id"] for row in mixed if row["id"] in {k["id"] for k in kept}]
    by_id = {row["id"]: row for row in kept}
    assert (by_id["a3"]["selected_rank"], by_id["a1"]["selected_rank"]) == (1, 2)
    deviation = 12.5**0.5  # of 1 and 6, ddof = 1
    assert by_id["a3"]["advantage"] == pytest.approx(2.5 / (deviation + 1e-4))
    assert by_id["a1"]["advantage"] == -by_id["a3"]["advantage"]
    assert "2 groups, 0 of them with equal rewards" in result.output


def test_advantages_before_selection_use_the_whole_group(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [0, 1, 1, 1]))
    select(source, "-m", 2, "--advantages", "before", "--output", tmp_path / "k.jsonl")
    assert {round(row["advantage"], 2) for row in rows_of(tmp_path / "k.jsonl")} == {-1.5, 0.5}


def test_small_groups_are_kept_whole_and_counted(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [1, 2, 3]) + rollouts("b", [1]))
    result = select(source, "-m", 4, "--output", tmp_path / "k.jsonl")
    assert len(rows_of(tmp_path / "k.jsonl")) == 4
    assert "2 groups had fewer than 4 rows and were kept whole" in result.output
    assert "1 of them with equal rewards" in result.output


def test_other_keys_any_group_value_null_and_true(tmp_path):
    rows = [{"g": {"id": [1]}, "score": score} for score in (None, True, False, 0.5)]
    rows += [{"g": 1, "score": 1}, {"g": "1", "score": 2}]
    source = write(tmp_path / "r.jsonl", rows)
    select(source, "-m", 2, "--group-by", "g", "--reward-key", "score", "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    assert [row["score"] for row in kept] == [True, False, 1, 2]
    assert [row["selected_rank"] for row in kept] == [1, 2, 1, 1]


def test_an_unscored_row_that_must_be_kept_ranks_last_with_no_advantage(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [None, 1]))
    select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    unscored, scored = rows_of(tmp_path / "k.jsonl")
    assert (unscored["selected_rank"], unscored["advantage"], unscored["reward"]) == (2, 0, None)
    assert scored["selected_rank"] == 1


def test_a_random_rule_is_seeded(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", range(50)))

    def ids(seed):
        select(source, "-m", 5, "--rule", "random", "--seed", seed, "--output", tmp_path / "k.jsonl")
        return [row["id"] for row in rows_of(tmp_path / "k.jsonl")]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


BAD = [
    ("x", "line 2: is not JSON"),
    ("[1]", r"line 2: is not a JSON object but \[1\]"),
    ('{"prompt": 1}', "line 2: has no key 'reward'; it has 'prompt'"),
    ('{"reward": 1}', "line 2: has no key 'prompt'"),
    ('{"prompt": 1, "reward": "high"}', "line 2: its reward is 'high', expected a finite number"),
    ('{"prompt": 1, "reward": Infinity}', "line 2: its reward is inf"),
    ("[" * 20_000, "line 2: is n"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_lines_are_named_and_nothing_is_written(tmp_path, line, message):
    source = write(tmp_path / "r.jsonl", [*rollouts("a", [1]), line, *rollouts("a", [2, 3])])
    with pytest.raises(UserError, match=message):
        select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert not (tmp_path / "k.jsonl").exists()
    result = select(source, "-m", 2, "--output", tmp_path / "k.jsonl", "--skip-bad")
    assert [row["reward"] for row in rows_of(tmp_path / "k.jsonl")] == [1, 3]
    assert "1 bad lines skipped" in result.output


def test_many_bad_lines_are_counted(tmp_path):
    source = write(tmp_path / "r.jsonl", ["x"] * 25)
    with pytest.raises(UserError, match=r"(?s)has 25 bad lines.*line 10: .*and 15 more$"):
        select(source)


def test_other_mistakes(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [1, 2, 3]))
    with pytest.raises(UserError, match="did you mean 'max_variance'"):
        select(source, "-m", 2, "--rule", "max_varience")
    with pytest.raises(UserError, match="'during'"):
        select(source, "-m", 2, "--advantages", "during")
    with pytest.raises(UserError, match=r"Cannot read .*No such file"):
        select(tmp_path / "gone")
    with pytest.raises(UserError, match="holds no rollouts"):
        select(write(tmp_path / "empty.jsonl", ["", " "]))
    for directory in ("", ".", tmp_path):
        with pytest.raises(UserError, match="is a directory: give a file"):
            select(source, "-m", 2, "--output", directory)
    with pytest.raises(UserError, match="Cannot write"):
        select(source, "-m", 2, "--output", tmp_path / "gone" / "k.jsonl")
    assert select(source, "-m", 0).exit_code == 2


def test_it_is_a_filter(monkeypatch):
    lines = "".join(json.dumps(row) + "\n" for row in rollouts("a", [1, 2, 3]))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    result = select("-", "-m", 2, "--output", "-", stdin=lines)
    assert [json.loads(line)["reward"] for line in result.stdout.splitlines()] == [1, 3]
    assert "1 groups" in result.stderr


def test_without_an_output_nothing_is_written(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [1, 2, 3]))
    assert "Nothing written: give --output" in select(source, "-m", 2).output
    assert list(tmp_path.iterdir()) == [source]


def test_rows_of_a_ledger_are_read_as_its_json_would_be(tmp_path):
    rows = rollouts("a", [1, 2, 3]) + rollouts("b", [0.0, None, float("nan")])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    select(write(tmp_path / "r.jsonl", rows), "-m", 2, "--output", tmp_path / "j.jsonl")
    one = write_parquet(tmp_path / "rollouts" / "step-000001.parquet", columns)
    select(one, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert rows_of(tmp_path / "k.jsonl") == rows_of(tmp_path / "j.jsonl")
    write_parquet(tmp_path / "rollouts" / "step-000002.parquet", columns)
    result = select(one.parent, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert rows_of(tmp_path / "k.jsonl") == 2 * rows_of(tmp_path / "j.jsonl")
    assert "4 groups" in result.output  # a prompt of two steps is two groups


def test_rows_with_turns_are_selected_and_written(tmp_path):
    columns = {
        "prompt": ["a"] * 3,
        "reward": [0.0, 0.5, 1.0],
        "messages": [None, '[{"role": "assistant", "content": "1"}]', "[]"],
        "turn_rewards": [None, [0.5], [0.0, float("nan")]],
    }
    ledger = write_parquet(tmp_path / "rollouts" / "step-000001.parquet", columns).parent
    select(ledger, "-m", 2, "--output", tmp_path / "k.jsonl")
    kept = rows_of(tmp_path / "k.jsonl")
    assert [row["messages"] for row in kept] == [None, "[]"]
    assert [row["turn_rewards"] for row in kept] == [None, [0.0, None]]


def test_parquet_that_cannot_be_selected_from_is_refused(tmp_path):
    path = write_parquet(tmp_path / "d" / "r.parquet", {"prompt": ["a", "a"], "rewards": [1.0, 2.0]})
    with pytest.raises(UserError, match=r"(?s)2 bad lines.*row 1: has no key 'reward'; .*Did you mean rewards\?"):
        select(path)
    with pytest.raises(UserError, match=r"r\.parquet row 1: has no key"):
        select(path.parent)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="is not a complete Parquet file"):
        select(path)
    with pytest.raises(UserError, match="holds no Parquet file"):
        select(tmp_path)


@pytest.mark.parametrize("option", ["--reward-key", "--reward_key", "--reward_key="])
def test_options_take_either_spelling(tmp_path, option):
    source = write(tmp_path / "r.jsonl", [{"p_q": 1, "score": 1}, {"p_q": 1, "score": 2}])
    words = [f"{option}score"] if option.endswith("=") else [option, "score"]
    select(source, "--group_by", "p_q", *words, "--skip_bad", "--output", tmp_path / "k.jsonl")
    assert len(rows_of(tmp_path / "k.jsonl")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * 400, r"line 1: its reward is 1{40}\.\.\., expected a finite number"),
        ("-" + "1" * 400, "line 1: its reward is -1{39}"),
        ("1" * 400 + ".0", "line 1: its reward is inf"),
        ("1" * 5000, "line 1: is not JSON"),
        ("1e400", "line 1: its reward is inf"),
        ("-Infinity", "line 1: its reward is -inf"),
        ('"0.5"', "line 1: its reward is '0.5'"),
        ('"' + "x" * 100_000 + '"', r"line 1: its reward is 'x{39}\.\.\., expected"),
        ("[1]", r"line 1: its reward is \[1\]"),
    ],
)  # fmt: skip
def test_rewards_that_are_no_finite_number_are_bad_lines(tmp_path, text, message):
    source = tmp_path / "r.jsonl"
    source.write_text(f'{{"prompt": "a", "reward": {text}}}\n{{"prompt": "a", "reward": 1}}\n')
    with pytest.raises(UserError, match=message):
        select(source)
    select(source, "--skip-bad", "--output", tmp_path / "k.jsonl")
    assert [row["reward"] for row in rows_of(tmp_path / "k.jsonl")] == [1]


@pytest.mark.parametrize("depth", [250, 900, 100_000])
@pytest.mark.parametrize("shape", ['{"a": %s}', "[%s]"])
def test_a_prompt_nested_too_deep_is_a_bad_line(tmp_path, depth, shape):
    before, after = shape.split("%s")
    source = tmp_path / "r.jsonl"
    source.write_text(f'{{"prompt": {before * depth}1{after * depth}, "reward": 1}}\n')
    with pytest.raises(UserError, match="line 1: is nested too deeply"):
        select(source)


def test_a_prompt_may_nest(tmp_path):
    prompt = "[" * 190 + "1" + "]" * 190
    source = tmp_path / "r.jsonl"
    source.write_text(f'{{"prompt": {prompt}, "reward": 1}}\n')
    select(source, "--output", tmp_path / "k.jsonl")
    assert json.dumps(rows_of(tmp_path / "k.jsonl")[0]["prompt"]) == prompt


def test_odd_bytes(tmp_path):
    source = tmp_path / "r.jsonl"
    line = '{"prompt": "é\u2028", "reward": 1}'
    source.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n" + line.encode("latin-1", "replace") + b"\r\n")
    with pytest.raises(UserError, match=r"1 bad line;(?s:.*)line 2: is not UTF-8 text \(byte 0xe9 at position 13\)"):
        select(source)
    select(source, "--skip-bad", "--output", tmp_path / "k.jsonl")
    assert rows_of(tmp_path / "k.jsonl")[0]["prompt"] == "é\u2028"


def test_huge_rewards_are_summarised(tmp_path):
    source = write(tmp_path / "r.jsonl", rollouts("a", [1e308, -1e308, 1e308, 1e308, -0.0]))
    select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    assert [row["advantage"] for row in rows_of(tmp_path / "k.jsonl")] == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pods_rl.cli.select._LONGEST_LINE", 1000)
    source = write(tmp_path / "r.jsonl", rollouts("a" * 2000, [1]))
    with pytest.raises(UserError, match=r"line 1 has 1,000 bytes or more"):
        select(source, "--skip-bad")


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_out_of_range_is_refused(tmp_path, seed):
    assert select(write(tmp_path / "r.jsonl", rollouts("a", [1])), "--seed", seed).exit_code == 2


def test_parquet_is_written_with_every_column_and_read_again(tmp_path):
    rows = [{**row, "source": {"book": 1}} for row in rollouts("a", [3, 1, 2])] + rollouts("b", [1, 0, 1])
    source = write(tmp_path / "r.jsonl", rows)
    select(source, "-m", 2, "--output", tmp_path / "k.parquet")
    select(source, "-m", 2, "--output", tmp_path / "k.jsonl")
    table = pq.read_table(tmp_path / "k.parquet").to_pylist()
    assert [{key: value for key, value in row.items() if value is not None} for row in table] == rows_of(
        tmp_path / "k.jsonl"
    )
    assert table[0]["source"] == {"book": 1}
    result = select(tmp_path / "k.parquet", "-m", 1)
    assert "2 groups" in result.output


def test_a_column_of_mixed_types_is_refused_for_parquet(tmp_path):
    source = write(tmp_path / "r.jsonl", [{"prompt": "a", "reward": 1, "x": 1}, {"prompt": "a", "reward": 0, "x": "1"}])
    with pytest.raises(UserError, match=r"a column holds values of different types .* Write JSONL instead"):
        select(source, "--output", tmp_path / "k.parquet")
    assert not (tmp_path / "k.parquet").exists()


@pytest.fixture
def sets(monkeypatch, tmp_path):
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf://me/gone"], "hf://me/gone: cannot read split train: no me/gone.*Check the name, --split"),
        (["hf://me/rollouts", "--split", "test"], "cannot read split test"),
        (["hf://me/a/b"], "hf://me/a/b: expected a data set of the hub as hf://owner/name"),
        (["hf://me/rollouts", "--output", "hf://a b"], "--output hf://a b: expected a data set"),
        (["hf://me/rollouts", "--reward-key", "score"], "row 1: has no key 'score'"),
        (["me/rollouts"], "No such file or directory.*For a data set of the hub, give hf://me/rollouts"),
    ],
)
def test_mistakes_with_data_sets_of_the_hub(sets, words, message):
    with pytest.raises(UserError, match=message):
        select(*words)
