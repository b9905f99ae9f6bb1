"""How words and YAML values become a key's type."""

import pytest

from pods_rl.errors import UserError
from pods_rl.recipe.schema import fields, parse_overrides
from pods_rl.yaml_files import parse_yaml

LOOP: dict = {}
LOOP["a"] = LOOP


def bomb(form: str) -> str:
    """Nine times as large with each line."""
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    return "a: &a {x: 1}\n" + "".join(f"{new}: &{new} {form % ', '.join([f'*{old}'] * 9)}\n" for old, new in pairs)


@pytest.mark.parametrize(
    ("key", "value", "converted"),
    [
        ("max_steps", 1e3, 1000),
        ("bf16", None, None),
        ("skip_zero_advantage_steps", None, None),  # PODSConfig then decides
        ("save_strategy", False, "no"),  # YAML 1.1 reads a bare no as false
        ("lora_target_modules", "all-linear", ["all-linear"]),
        ("fsdp", True, True),
    ],
)
def test_values_of_yaml(key, value, converted):
    assert fields()[key].convert(value) == converted
    assert type(fields()[key].convert(value)) is type(converted)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learning_rate", "fast", "'fast'"),
        ("max_steps", 1.5, r"1\.5"),
        ("prefix_tree", 1, "got 1,"),
        ("loss_type", "gropo", r"grpo\?"),
        ("num_rollouts", 1e30, r"1e\+30"),
        ("generation_kwargs", {"a": [float("nan")]}, "finite"),
        ("generation_kwargs", LOOP, "finite"),
    ],
)
def test_values_of_another_type_are_refused(key, value, message):
    with pytest.raises(ValueError, match=message):
        fields()[key].convert(value)


@pytest.mark.parametrize(
    ("key", "word", "value"),
    [
        ("num_rollouts", "null", None),
        ("learning_rate", "1e-6", 1e-6),
        ("prefix_tree", "false", False),
        ("run_name", "12", "12"),
        ("system_prompt", "Add: up", "Add: up"),
        ("lora_target_modules", "[q, v]", ["q", "v"]),
        ("pad_to_multiple_of", "auto", "auto"),
    ],
)
def test_words_of_the_command_line(key, word, value):
    parsed = fields()[key].parse(word)
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides():
    words = ["--a-b", "1", "--c=x=y", "--flag", "--d", "-1", "--a-b", "2"]
    assert parse_overrides(words) == {"a_b": "2", "c": "x=y", "flag": True, "d": "-1"}
    for words in (["stray"], ["-x", "1"], ["--"]):
        with pytest.raises(UserError, match="--key"):
            parse_overrides(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nbeta: 0\nseed: 2\n", r"r\.yaml:3: seed .*line 1\b"),
        ("seed: 1\n\tbeta: 0\n", r"r\.yaml:2: .*'\\t'"),
        ("", "nothing"),
        ("1: 2\n", "key 1 "),
        ("seed: 1\n---\nseed: 2\n", r"r\.yaml:2: "),
        ("a: !!bool maybe\n", "YAML"),
        ("a: &a [*a]\n", r"r\.yaml:1: .*alias"),
        pytest.param(bomb("[%s]"), "10,000", id="lists"),
        pytest.param("a: [" + "1," * 30_000 + "]\n", "10,000", id="a long list"),
    ],
)
def test_yaml_that_is_no_recipe(text, message):
    with pytest.raises(UserError, match=message):
        parse_yaml(text, "r.yaml")


def test_lines_survive_comments_and_merges():
    values, source = parse_yaml("# head\na: &x {p: 1}\n\nb: {<<: *x, q: 2}\n", "r.yaml")
    assert values == {"a": {"p": 1}, "b": {"p": 1, "q": 2}}
    assert (source.where("b"), source.where("c")) == ("r.yaml:4: ", "r.yaml: ")
