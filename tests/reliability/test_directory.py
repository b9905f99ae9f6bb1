"""What happens to a run's directory, or before there is one: a run that cannot be kept ends with one line."""

from __future__ import annotations

from pods_rl.runs import Run, RunWriter

from .commands import server, write_recipe


def test_a_run_whose_directory_is_moved_ends_with_one_line(tmp_path):
    write_recipe(tmp_path, max_steps=100_000, save_steps=1000)
    run = tmp_path / "run"
    command = server().start("train", "--config", "r.yaml", "--output", "run", cwd=tmp_path)
    assert command.until(lambda: len(Run(run).metrics) > 1), command.log.read_text()
    run.rename(tmp_path / "elsewhere")
    assert command.wait() == 2
    printed = command.log.read_text()
    assert [line for line in printed.splitlines() if "Error" in line] == [printed.splitlines()[-1]]
    assert "Traceback" not in printed
    assert not run.exists()


def test_a_run_that_never_began_leaves_no_directory(tmp_path):
    RunWriter(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    RunWriter(tmp_path / "mine").close()
    assert (tmp_path / "mine").exists()
