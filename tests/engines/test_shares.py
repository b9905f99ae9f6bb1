"""Which process generates and trains which rollouts."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pods_rl.engines.trl.batching import Shares


@given(prompts=st.integers(1, 9), m=st.integers(1, 9), extra=st.integers(0, 20), processes=st.integers(1, 12))
def test_every_rollout_and_row_has_one_process_and_equally_many_rows_are_trained_on_each(prompts, m, extra, processes):
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
