"""`pods watch`: the page of runs that train, from the server. In a browser: test_report_browser.py."""

import http.client
import json
import subprocess
import sys
from pathlib import Path

import psutil
from conftest import grow, serving, write_run
from tests import DEADLINE, until

from pods_rl.report.live import LivePage
from pods_rl.runs import Run
from pods_rl.runs.processes import this_process


def ask(port: int, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def look(page: LivePage) -> str:
    """What the page shows now."""
    page.look()
    return page.served.page.decode().replace("\u00a0", " ")


def test_a_report_is_made_again_when_a_file_changes_and_only_then(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", end=0, state="running")
    page = LivePage(run)
    page.look()
    version = page.served.version
    page.look()
    assert page.served.version == version
    grow(run, 1.0, 0.1)
    (run / "status.json").write_text('{"state": "finished"}')
    assert "to 10.0 % accuracy" in look(page)
    assert (page.served.version, page.served.state) == (version + 1, "1 finished")


def test_a_kill_which_changes_no_file_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", end=0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    about = {**this_process(), "pid": process.pid, "started": psutil.Process(process.pid).create_time()}
    (run / "status.json").write_text(json.dumps({"state": "running", "process": about}))
    page = LivePage(run)
    page.look()
    assert page.served.state == "1 running"
    process.kill()
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    page.look()
    assert page.served.state == "1 killed"
    process.communicate()
    assert Run(run).state == "killed"
    (run / "status.json").write_text(json.dumps({"state": "running", "process": about | {"host": "another"}}))
    assert Run(run).state == "running"


def test_a_run_is_shown_before_its_first_evaluation_with_its_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path / "pods" / "seed-0", config={"max_seconds": 600.0, "max_steps": -1})
    for name in ("metrics.jsonl", "evals.jsonl"):
        (run / name).unlink()
    (run / "status.json").write_text('{"state": "running", "reason": "loading"}')
    page = LivePage(tmp_path)
    parts = look(page)
    assert "No evaluation of accuracy yet: 1 run trains." in parts
    assert ">loading</td>" in parts
    assert "<h2>Result</h2>" not in parts
    (run / "metrics.jsonl").write_text('{"step": 30, "seconds": 150.0, "reward": 0.5}\n')
    parts = look(page)
    for cell in ("running, 25 %", "30", "150.0 s", "0.500"):
        assert f">{cell}<" in parts
    grow(run, 300.0, 0.25)
    (run / "status.json").write_text('{"state": "finished"}')
    assert ">last reward<" not in look(page)


def test_runs_of_an_experiment_that_have_not_begun_are_counted(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("arms: {grpo: {}, pods: {}}\nseeds: [3, 4]\n")
    write_run(tmp_path / "grpo" / "seed-3", end=30)
    page = LivePage(tmp_path)
    page.look()
    assert page.served.state == "1 finished, 3 not begun"
    (tmp_path / "experiment.yaml").write_text("arms: [torn")
    page.look()
    assert page.served.state == "1 finished"


def test_a_page_waits_for_runs_and_outlives_damage(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "pods" / "seed-0"
    page = LivePage(tmp_path / "runs")
    assert "Waiting" in look(page)
    write_run(run, end=30)
    page.look()
    made = page.served
    assert b"ledger-data" in made.page
    assert b"went from" in made.page
    for path in run.iterdir():
        path.unlink()
    page.look()
    assert page.served.page == made.page
    assert page.served.note


def test_only_a_reader_on_this_machine_is_answered(tmp_path: Path) -> None:
    page = LivePage(write_run(tmp_path / "run", end=30))
    page.look()
    with serving(page) as port:
        for path in ("/", "/state"):
            assert ask(port, path=path)[0] == 200
            assert ask(port, "HEAD", path) == (200, "")
        state = json.loads(ask(port, path="/state")[1])
        assert state["state"] == "1 finished"
        assert state["age"] >= 0
        assert f'data-version="{state["version"]}"' in ask(port)[1]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1:1@evil", ""):
            assert ask(port, Host=host)[0] == 421
        for path in ("/../etc/passwd", "//etc/passwd", "/report.html", "/?x", f"http://127.0.0.1:{port}/"):
            assert ask(port, path=path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "FOO"):
            assert ask(port, method)[0] == 501
