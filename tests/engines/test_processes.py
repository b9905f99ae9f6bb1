"""Many processes train as one does: the same rollouts kept, the same advantages, the same update. Real gloo processes.

What the policy samples is replaced by `many_processes.numbered_rollouts` in all cases but one, so that every layout has
the same rollouts to choose from; all the rest is the real trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import ceil

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from pods_rl.engines.trl.batching import Shares
from pods_rl.engines.trl.generated import Conversation
from pods_rl.engines.trl.rows import KeptRow, from_bytes, to_bytes
from pods_rl.runs import Run

from .. import DEADLINE
from ..test_evaluation_processes import RECIPE
from .many_processes import ALL, CASES, IMAGES, STEPS, WAVES

several = pytest.mark.parametrize("case", CASES)
with_waves = pytest.mark.parametrize("case", ALL)


@pytest.fixture(scope="session")
def ran(run_processes):
    """The folder in which every process of every case left its report."""
    return run_processes("many_processes")


def reports(folder, case, world):
    return [json.loads((folder / f"{case}-{world}-{rank}.json").read_text()) for rank in range(world)]


def one_and_many(folder, case):
    (one,) = reports(folder, case, 1)
    return one, reports(folder, case, ALL[case][0])


def joined(many, step, key):
    return [item for report in many for item in report["rounds"][step][key]]


@pytest.mark.slow
@with_waves
def test_the_same_rollouts_are_kept_in_the_same_order(ran, case):
    one, many = one_and_many(ran, case)
    for step in range(STEPS):
        expected = one["rounds"][step]
        for key in ("kept", "groups"):
            assert all(report["rounds"][step][key] == expected[key] for report in many)
        for groups, kept in zip(expected["groups"], expected["kept"], strict=True):
            rows = list(zip(groups, kept, strict=True))
            assert rows == sorted(rows)
        for key in ("asked", "prompt", "completion"):
            assert joined(many, step, key) == expected[key], key
        assert joined(many, step, "advantages") == pytest.approx(expected["advantages"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", IMAGES)
def test_rows_take_their_images_to_the_process_that_trains_them(ran, case):
    one, many = one_and_many(ran, case)
    for step in range(STEPS):
        assert joined(many, step, "pixels") == one["rounds"][step]["pixels"]
    assert sum(log["pods/rows_moved"] for log in many[0]["logs"]) > 0


@pytest.mark.slow
@several
def test_every_process_trains_the_same_number_of_rows(ran, case):
    _, many = one_and_many(ran, case)
    settings = CASES[case][1]
    share = settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)
    assert {len(step["advantages"]) for report in many for step in report["rounds"]} == {share}


@pytest.mark.slow
@with_waves
def test_the_update_is_the_single_process_s(ran, case):
    world = ALL[case][0]
    expected = load_file(ran / f"{case}-1-0.safetensors")
    assert any(key.startswith("gradient") and value.abs().max() > 1e-3 for key, value in expected.items())
    for rank in range(world):
        got = load_file(ran / f"{case}-{world}-{rank}.safetensors")
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(got[key], value, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow
@with_waves
def test_metrics_and_tables_are_the_single_process_s(ran, case):
    one, many = one_and_many(ran, case)
    for expected, row in zip(one["logs"], many[0]["logs"], strict=True):
        assert row.pop("pods/rows_moved") >= 0
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            if "seconds" not in name and "time" not in name:
                # TRL averages these over micro-batches, and which rows share one depends on the layout.
                loose = name in ("entropy", "kl") and "gradient_accumulation_steps" in ALL[case][1]
                assert row[name] == pytest.approx(value, rel=1e-3 if loose else 1e-5, abs=1e-6), name
    tables = many[0]["tables"]
    assert tables == one["tables"]
    ledger = one["rounds"][-1]["ledger"]
    kept = [text for text, chosen in zip(ledger["completion"], ledger["selected"], strict=True) if chosen]
    assert sorted(tables["completion"]) == sorted(kept)
    assert (
        case in WAVES | IMAGES or tables["completion"] == kept
    )  # places that were refilled are before their groups' numbers
    assert tables["extra"] == [len(text) for text in tables["completion"]]


@pytest.mark.slow
@with_waves
def test_the_ledger_has_each_rollout_once(ran, case):
    one, many = one_and_many(ran, case)
    for step in range(STEPS):
        ledgers = [report["rounds"][step]["ledger"] for report in many]
        places = [place for ledger in ledgers for place in zip(ledger["group"], ledger["rollout"], strict=True)]
        order = sorted(range(len(places)), key=places.__getitem__)
        assert case in WAVES | IMAGES or order == list(range(len(places)))  # waves move prompts between processes
        for name, expected in one["rounds"][step]["ledger"].items():
            values = [value for ledger in ledgers for value in ledger[name]]
            values = [values[i] for i in order]
            if name != "advantage":
                assert values == expected, name
            else:
                assert [v is None for v in values] == [v is None for v in expected]
                assert [v for v in values if v is not None] == pytest.approx([v for v in expected if v is not None])


@pytest.mark.slow
@several
def test_only_rewards_and_the_rows_that_move_travel(ran, case):
    """Exactly: three numbers that TRL gathers and one reward per rollout, a check, and the bytes of moved rows."""
    _, many = one_and_many(ran, case)
    world, settings = CASES[case]
    n, m = settings["num_rollouts"], settings["num_generations"]
    for step in range(STEPS):
        ledgers = [report["rounds"][step]["ledger"] for report in many]
        kept = many[0]["rounds"][step]["kept"]
        shares = Shares(len(kept), n, m, world)
        per_rollout = 8 + 8 + 1 + 4  # prompt and completion length, truncated or not, reward
        moving = {rank: [] for rank in range(world)}
        completions = joined(many, step, "completion")
        for row, rollout in enumerate(n * p + i for p, group in enumerate(kept) for i in group):
            source = shares.generator(rollout)
            if source != row // (len(kept) * m // world):
                text = ledgers[source]["completion"][rollout - shares.rollouts(source).start]
                moving[source].append(KeptRow(completions[row], text, None, {"characters": len(text)}))
        assert many[0]["logs"][step]["pods/rows_moved"] == sum(map(len, moving.values()))
        for rank, report in enumerate(many):
            traffic = report["rounds"][step]["traffic"]
            check = 8 if n > m else 0
            assert traffic["gathered"] == per_rollout * max(shares.counts) + check
            sizes = 8 * world if any(moving.values()) else 0
            assert traffic["moved"] == len(to_bytes(moving[rank])) + sizes


@pytest.mark.slow
def test_waves_stop_refill_and_share_over_processes(ran):
    for case, metric in {
        "waves of one group over two": "pods/waves/decided",
        "waves of three groups over four": "pods/waves/gave_up",
        "waves, refilled, over two": "pods/refill/prompts_drawn",
        "images by tile, in waves, over two": "pods/waves/decided",
    }.items():
        assert sum(row[metric] for row in one_and_many(ran, case)[0]["logs"]) > 0, case
    shared = [step["groups"] for step in one_and_many(ran, "shared over two")[0]["rounds"]]
    assert any(len(set(groups)) > 1 for step in shared for groups in step)


@pytest.mark.slow
def test_groups_do_straddle_and_whole_ones_stay(ran):
    logs = {case: one_and_many(ran, case)[1][0]["logs"] for case in CASES}
    moved = {case: sum(row["pods/rows_moved"] for row in rows) for case, rows in logs.items()}
    still = {"several whole groups each", "plain GRPO over two", "dead groups over two"}
    assert {case for case, rows in moved.items() if rows == 0} == still


@pytest.mark.slow
def test_a_rule_that_differs_by_process_is_refused_on_all_of_them(ran):
    for rank in range(2):
        said = (ran / f"refused-{rank}.txt").read_text()
        assert said.startswith("UserError: rule 'tests.engines.many_processes:process_s_own_choice' kept other")
        assert "process 1 than on process 0" in said


@pytest.mark.slow
def test_faults_of_one_process_are_counted_by_all_and_its_bad_step_left_out_by_all(ran):
    first, second = (json.loads((ran / f"faults-{rank}.json").read_text()) for rank in range(2))
    assert first["raised"] == 0 < second["raised"]
    assert first["moved"] == second["moved"] == [False, True]
    for report in (first, second):
        assert sum(line["pods/reward_errors"] for line in report["logs"]) == second["raised"]
        assert [line["pods/bad_loss"] for line in report["logs"]] == [1.0, 0.0]
        assert report["logs"][0]["loss"] == float("inf")
    assert second["said"] == []
    assert [message[:30] for message in first["said"]] == [
        "reward function 'picky' raised",
        "step 1: loss inf, gradient nor",
    ]


# -- the command ------------------------------------------------------------------------------------------------------


def run_lines(printed, start):
    return sum(line.startswith(start) for line in printed.splitlines())


@pytest.mark.slow
def test_pods_train_on_two_processes_with_a_group_over_both(tmp_path):
    recipe = RECIPE | {"num_generations": 4, "num_rollouts": 7, "eval_prompts": 0, "ledger_every": 1}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    command = ["train", "--config", "r.yaml", "--output", "run", "--num_processes", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "pods_rl", *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert run_lines(done.stdout, "run: importing TRL") == 1  # one process speaks, and only the run
    assert run_lines(done.stdout, "run") == len(done.stdout.splitlines())
    assert done.stderr == ""
    run = Run.open(tmp_path / "run")
    assert run.state == "finished"
    assert (run.path / "checkpoints" / "final" / "model.safetensors").is_file()
    assert [row["step"] for row in run.metrics] == [1, 2]
    for row in run.metrics:
        ledger = pq.read_table(run.path / "rollouts" / f"step-{row['step']:06d}.parquet").to_pydict()
        assert list(zip(ledger["group"], ledger["rollout"], strict=True)) == [(0, i) for i in range(7)]
        assert len(set(ledger["prompt"])) == 1
        assert sum(ledger["selected"]) == 4
        assert row["reward"] == pytest.approx(sum(ledger["reward"]) / 7)
        assert row["pods/tokens/generated"] == sum(ledger["completion_tokens"])
        kept = [t for t, chosen in zip(ledger["completion_tokens"], ledger["selected"], strict=True) if chosen]
        assert row["pods/tokens/trained"] == (0 if row["pods/skipped_step"] else sum(kept))


# -- the arithmetic and the parcels ---------------------------------------------------------------------------------


@given(prompts=st.integers(1, 9), m=st.integers(1, 9), extra=st.integers(0, 20), processes=st.integers(1, 12))
def test_shares(prompts, m, extra, processes):
    if prompts * m % processes:
        with pytest.raises(ValueError, match="cannot be shared equally"):
            Shares(prompts, m + extra, m, processes)
        return
    shares = Shares(prompts, n := m + extra, m, processes)
    everyone = range(processes)
    assert [r for process in everyone for r in shares.rollouts(process)] == list(range(prompts * n))
    assert [r for process in everyone for r in shares.rows(process)] == list(range(prompts * m))
    assert {len(shares.rows(process)) for process in everyone} == {prompts * m // processes}
    assert max(shares.counts) - min(shares.counts) == (0 if shares.even else 1)
    assert max(shares.counts) == ceil(prompts * n / processes)
    for process in everyone:
        assert {shares.generator(r) for r in shares.rollouts(process)} == {process}
        assert {shares.trainer(r) for r in shares.rows(process)} == {process}
        assert {r // n for r in shares.rollouts(process)} == {r // m for r in shares.rows(process)}
    assert shares.whole_groups == all(shares.rows(process).start % m == 0 for process in everyone)


TEXT = st.text() | st.lists(st.fixed_dictionaries({"role": st.just("assistant"), "content": st.text()}), max_size=1)


@given(
    st.lists(
        st.builds(
            KeptRow,
            st.lists(st.integers(0, 2**31 - 1)),
            TEXT,
            st.none() | st.lists(st.floats(width=32, allow_nan=False)),
            st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=2),
        ),
        max_size=4,
    )
)
def test_a_parcel_opens_to_what_was_packed(rows):
    assert from_bytes(to_bytes(rows)) == rows


def test_a_parcel_takes_images_and_nothing_that_a_policy_wrote_becomes_one():
    picture = Image.effect_noise((5, 4), 60).convert("RGBA")
    hostile = {"__image__": "x", "TIFF": {"a" * 16: "b"}, "text": "\ud800"}
    prompt = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "a"}]}]
    more = Conversation(prompt, prompt, [1, 2], [1, 0], {"call": hostile}, [picture], [], [0.5, None])
    (row,) = from_bytes(to_bytes([KeptRow([3], [{"content": hostile}], [0.5], {}, more)]))
    assert row.completion == [{"content": hostile}]
    assert row.more.fields == {"call": hostile}
    assert (row.more.prompt_ids, row.more.tool_mask, row.more.turn_rewards) == ([1, 2], [1, 0], [0.5, None])
    for image in (row.more.images[0], row.more.asked[0]["content"][0]["image"]):
        assert image.mode == "RGBA"
        assert image.tobytes() == picture.tobytes()


@pytest.mark.slow
def test_environments_live_where_their_rollouts_are_and_kept_rows_take_their_turns_along(ran):
    first, second = (json.loads((ran / f"tools-{rank}.json").read_text()) for rank in range(2))
    assert first["alive"] == second["alive"] == 0
    assert (len(first["prompts"]), len(second["prompts"])) == (3, 4)
    start = int(first["prompts"][0].rsplit(" ", 1)[1].rstrip("."))
    for report in (first, second):
        assert {prompt.split("Count from ")[1] for prompt in report["prompts"]} == {f"{start}."}
        assert report["rewards"] == [[start + 2.0 * by for by in (0, 1, 2, 10, 11, 12, 13)]]
        assert sorted(report["kept"][0]) == [0, 1, 5, 6]
        assert report["calls"] == 14
        assert all(f"Count from {start}." in text for text in report["trained"])
    told = [text.split("<tool_response>")[1:] for report in (first, second) for text in report["told"]]
    counts = [[int(part.split("\n")[1]) for part in parts] for parts in told]
    assert sorted(counts) == [[start + by, start + 2 * by] for by in (0, 1, 12, 13)]
