"""Many processes train as one does: the same rollouts kept, the same advantages, the same update. Real gloo processes.

What the policy samples is replaced by `many_processes.numbered_rollouts` in all cases but one, so that every layout has
the same rollouts to choose from; all the rest is the real trainer.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.numeric import FLOAT32, assert_near

from .many_processes import CASES, STEPS

every_case = pytest.mark.parametrize("case", CASES)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def ran(run_processes):
    """The folder in which every process of every case left its report."""
    return run_processes("many_processes")


def one_and_many(folder, case):
    def reports(world):
        return [json.loads((folder / f"{case}-{world}-{rank}.json").read_text()) for rank in range(world)]

    return *reports(1), reports(CASES[case][0])


def joined(many, step, key):
    return [item for report in many for item in report["rounds"][step][key]]


@every_case
def test_the_same_rollouts_are_kept_and_trained(ran, case):
    one, many = one_and_many(ran, case)
    for step in range(STEPS):
        expected = one["rounds"][step]
        assert all(report["rounds"][step]["kept"] == expected["kept"] for report in many)
        for key in {"asked", "prompt", "completion", "pixels"} & expected.keys():
            assert joined(many, step, key) == expected[key], key
        assert len({len(report["rounds"][step]["advantages"]) for report in many}) == 1
        assert_near(*(torch.tensor(x) for x in (joined(many, step, "advantages"), expected["advantages"])), FLOAT32)


@every_case
def test_the_update_is_the_single_process_s(ran, case):
    world = CASES[case][0]
    expected = load_file(ran / f"{case}-1-0.safetensors")
    assert any(key.startswith("gradient") and value.abs().max() > 1e-3 for key, value in expected.items())
    for rank in range(world):
        assert_near(load_file(ran / f"{case}-{world}-{rank}.safetensors"), expected, FLOAT32)


@every_case
def test_metrics_and_tables_are_the_single_process_s(ran, case):
    one, many = one_and_many(ran, case)
    for expected, row in zip(one["logs"], many[0]["logs"], strict=True):
        assert row.pop("pods/rows_moved", 0.0) >= 0
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            # Each process has a tree of its own.
            if not any(part in name for part in ("seconds", "time", "distinct_tokens", "tokens/computed")):
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert many[0]["tables"] == one["tables"]
    assert one["tables"]["extra"] == [len(text) for text in one["tables"]["completion"]]
    if "dynamic_sampling" in CASES[case][1]:
        return  # the table has the rows that were replaced, too
    ledger, completions = one["rounds"][-1]["ledger"], one["tables"]["completion"]
    kept = [text for text, chosen in zip(ledger["completion"], ledger["selected"], strict=True) if chosen]
    assert sorted(completions) == sorted(kept)


@every_case
def test_the_ledger_has_each_rollout_once(ran, case):
    one, many = one_and_many(ran, case)
    for step in range(STEPS):
        ledgers = [report["rounds"][step]["ledger"] for report in many]
        places = [place for ledger in ledgers for place in zip(ledger["group"], ledger["rollout"], strict=True)]
        order = sorted(range(len(places)), key=places.__getitem__)
        for name, expected in one["rounds"][step]["ledger"].items():
            values = [value for ledger in ledgers for value in ledger[name]]
            values = [values[i] for i in order]
            if name == "advantage":
                values, expected = ([round(v or 0.0, 4) for v in column] for column in (values, expected))
            assert values == expected, name


def test_rows_move_to_the_process_that_trains_them(ran):
    """So that the comparisons above have such rows."""
    moved = [line.get("pods/rows_moved", 0.0) for case in CASES for line in one_and_many(ran, case)[1][0]["logs"]]
    assert any(moved)


def test_faults_of_one_process_are_counted_by_all_and_its_bad_step_is_skipped_by_all(ran):
    first, second = (json.loads((ran / f"faults-{rank}.json").read_text()) for rank in range(2))
    assert first["raised"] == 0 < second["raised"]
    assert first["moved"] == second["moved"] == [False, True]
    for report in (first, second):
        assert sum(line.get("pods/reward_errors", 0.0) for line in report["logs"]) == second["raised"]
        assert [line.get("pods/bad_loss", 0.0) for line in report["logs"]] == [1.0, 0.0]
        assert report["logs"][0]["loss"] == float("inf")
    assert (len(first["said"]), second["said"]) == (2, [])


def test_environments_live_where_their_rollouts_are_and_kept_rows_take_their_turns_along(ran):
    first, second = (json.loads((ran / f"tools-{rank}.json").read_text()) for rank in range(2))
    assert first["alive"] == second["alive"] == 0
    assert (len(first["prompts"]), len(second["prompts"])) == (4, 4)
    start = int(first["prompts"][0].rsplit(" ", 1)[1].rstrip("."))
    for report in (first, second):
        assert {prompt.split("Count from ")[1] for prompt in report["prompts"]} == {f"{start}."}
        assert report["rewards"] == [[start + 2.0 * by for by in (0, 1, 2, 3, 10, 11, 12, 13)]]
        assert sorted(report["kept"]) == [0, 1, 6, 7]
        assert report["calls"] == 2.0  # a rollout
        assert all(f"Count from {start}." in text for text in report["trained"])
    told = [text.split("<tool_response>")[1:] for report in (first, second) for text in report["told"]]
    counts = [[int(part.split("\n")[1]) for part in parts] for parts in told]
    assert sorted(counts) == [[start + by, start + 2 * by] for by in (0, 1, 12, 13)]
