"""Which process generates and trains which rollouts, and rows on their way from one process to another."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pods_rl.engines.trl.generated import Conversation
from pods_rl.engines.trl.rows import KeptRow, from_bytes, to_bytes

from pods_rl.engines.trl.batching import Shares


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
