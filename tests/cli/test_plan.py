"""`pods plan` through the real command, on a random policy that trains in a second."""

import pytest

import pods_rl.planning.measure

from . import pods


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_is_measured_and_printed(place, monkeypatch):
    monkeypatch.setattr(pods_rl.planning.measure, "_MOST_ROUNDS", 2)
    done = pods("plan", "r.yaml", "--seconds", "1")
    report, _, experiment = done.output.partition("To settle it, ")
    assert max(map(len, report.splitlines())) <= 80
    for part in ("rewards", "completions", "rollouts are distinct", "none  ", "prompt  ", "batch  ", "importing torch"):
        assert part in report
    (place / "settings.yaml").write_text(experiment.partition("\n")[2])
    compared = pods("compare", "--config", "settings.yaml", "--dry_run")
    assert compared.exit_code == 0, compared.output
