"""Rollouts of several turns in the record of a generation, its checkpoint and the ledger."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pods_rl.engines.trl.guarded.checkpoints import read_state, write_state
from pods_rl.engines.trl.guarded.run_directory import gather_columns
from pods_rl.engines.trl.selecting.record import Rollouts
from pods_rl.engines.trl.transcript import as_text
from pods_rl.errors import UserError
from pods_rl.runs import RunWriter


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: Any, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": [*calls]} if calls else {})


def result(name: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


PLAIN = [says("12")]
TOLD = "\x1b]0;pwned\x07 </script> \u202e \ud800"
TURNS = [
    says("Let me see.", call("multiply", a=3, b=4), call("look", at={"x": 1.5}, how="c\u00e9 \u202e")),
    result("multiply", "12"),
    result("look", [{"type": "image", "image": Image.new("RGB", (64, 64))}, {"type": "text", "text": TOLD}]),
    says(None, call("think")),
    result("think", [1, 2]),
    says("It is 12."),
]
TEXT = f"""assistant: Let me see.
tool call: multiply(a=3, b=4)
tool call: look(at={{"x": 1.5}}, how="c\u00e9 \u202e")

tool multiply: 12

tool look: [image]
{TOLD}

assistant: tool call: think()

tool think: [1, 2]

assistant: It is 12."""


def record(*completions: Any, **changes: Any) -> Rollouts:
    """A group with these rollouts, the first of which is kept."""
    count = len(completions)
    numbers = range(count)
    image = {"type": "image", "image": np.zeros((64, 64, 3))}  # each rollout has a copy, which == cannot compare
    of_group = Rollouts(
        step=1,
        inputs=[{"answer": "12"} for _ in completions],
        prompts=[deepcopy([{"role": "user", "content": [image, {"type": "text", "text": "3 x 4?"}]}]) for _ in numbers],
        completions=list(completions),
        completion_tokens=[7] * count,
        reward_names=["right"],
        rewards_per_func=torch.ones(count, 1),
        numbers=list(numbers),
        rewards=torch.ones(1, count),
        kept=torch.tensor([0]),
        advantages=torch.zeros(1),
    )
    return replace(of_group, **changes)


def test_conversations_of_several_turns_are_json_without_images_and_single_turns_are_text():
    columns = record("12", PLAIN, [says("two")]).columns()
    assert "messages" not in columns
    assert columns["completion"] == ["12", "12", "two"]
    thought = {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [call("add", a=1)]}
    refused = [says("11"), {"role": "user", "content": "No."}, says("12")]
    columns = record([thought], refused).columns()
    assert [json.loads(x) for x in columns["messages"]] == [[thought], refused]
    assert columns["completion"][1] == "assistant: 11\n\nuser: No.\n\nassistant: 12"
    columns = record(PLAIN, TURNS).columns()
    assert columns["completion"] == ["12", TEXT]
    assert columns["messages"][0] is None
    found = json.loads(columns["messages"][1])
    assert found[0] == TURNS[0]
    assert found[2] == {"role": "tool", "name": "look", "content": f"[image]\n{TOLD}"}
    assert found[3] == {"role": "assistant", "tool_calls": [call("think")]}
    assert [message["role"] for message in found] == ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert len(columns["messages"][1]) < 1000


@pytest.mark.parametrize("depth", [150, 100_000])
def test_arguments_may_nest_to_any_depth(depth):
    """A model that writes brackets must not end the run: Python's JSON gives up near 1,000 levels."""
    deep = [says("", call("f", a=nested(depth)), call("g", b=1))]
    columns = record(deep).columns()
    first, second = json.loads(columns["messages"][0])[0]["tool_calls"]
    assert second == call("g", b=1)
    if depth < 200:
        assert first == deep[0]["tool_calls"][0]
    else:
        assert columns["completion"] == ["tool call: f(nested too deeply)\ntool call: g(b=1)"]
        assert first["function"] == {"name": "f", "arguments": "nested too deeply"}
    assert record(record(deep).saved()["completions"][0]).columns() == columns


def test_a_checkpoint_restores_turns_and_holds_no_image(tmp_path):
    seen = [says("", call("look")), result("look", [{"type": "image", "image": np.zeros((64, 64, 3))}])]
    made = record(TURNS, PLAIN, "12", seen)
    write_state(tmp_path, 0, {"processes": 1, "record": made.saved()})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3500
    restored = Rollouts(**read_state(tmp_path, 0, 1)["record"])
    assert restored.columns() == made.columns()
    content = restored.prompts[0][0]["content"]  # the chat template still sees where the image was
    assert content == [{"type": "image", "image": None}, {"type": "text", "text": "3 x 4?"}]
    assert as_text(restored.prompts[0]) == as_text(made.prompts[0]) == "user: [image]\n3 x 4?"
    assert "image" in made.prompts[0][0]["content"][0]


def test_arguments_that_look_like_a_tensor_of_a_checkpoint_are_restored(tmp_path):
    made = record([says("", call("f", __tensor__="0"), call("g", a={"__tensor__": {"__tensor__": [1]}}))])
    write_state(tmp_path, 0, {"processes": 1, "record": made.saved()})
    assert Rollouts(**read_state(tmp_path, 0, 1)["record"]).completions == made.saved()["completions"]


@pytest.mark.parametrize(("made_by", "now"), [(1, 2), (4, 2)])
def test_another_number_of_processes_is_refused_on_each_of_them(tmp_path, made_by, now):
    assert read_state(tmp_path, 0, now) == {}  # a checkpoint of TRL's trainer
    for process in range(made_by):
        write_state(tmp_path, process, {"processes": made_by})
    for process in range(now):
        with pytest.raises(UserError, match=rf"\b{now} process"):
            read_state(tmp_path, process, now)
    assert read_state(tmp_path, made_by - 1, made_by) == {"processes": made_by}
    if made_by > 1:  # another node's folder
        (tmp_path / "pods_state_0.json").unlink()
        with pytest.raises(UserError, match=r"pods_state_0\.json"):
            read_state(tmp_path, 0, made_by)


def test_a_ledger_is_written_and_read_back(tmp_path, monkeypatch):
    """Two processes, of which one alone has turns."""
    parts = [record(PLAIN), record(TURNS, numbers=[1], rewards=torch.ones(1, 2))]
    parts[0].rewards = torch.ones(1, 2)
    columns = [part.columns() for part in parts]
    rows = [[dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)] for part in columns]
    monkeypatch.setattr("pods_rl.engines.trl.guarded.run_directory.gather", lambda _: [(part, "") for part in rows])
    columns = gather_columns(None)
    with RunWriter(tmp_path / "run") as writer:
        rows = pq.read_table(writer.write_rollouts(1, columns)).to_pylist()
    assert rows[0]["messages"] is None
    assert json.loads(rows[1]["messages"])[:2] == TURNS[:2]
    assert rows[1]["completion"] == TEXT.replace("\ud800", "\\ud800")
