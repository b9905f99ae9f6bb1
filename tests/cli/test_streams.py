"""Standard streams that are closed, full, gone or of another encoding: no command breaks on them."""

import json
import os
import re
import subprocess
import sys

import pytest

from pods_rl.recipe import shipped_recipes

from .. import DEADLINE

pytestmark = pytest.mark.slow  # a process each

PODS = f"'{sys.executable}' -m pods_rl"
PROGRESS = r"((importing torch and TRL|checking the recipe and its data).*\n)*"
ROWS = "".join(json.dumps({"prompt": "a", "reward": reward}) + "\n" for reward in (0, 1, 2))


def shell(command: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command.replace("pods ", f"{PODS} ", 1)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("pods recipes <&- >&- 2>&-", 0),
        ("pods recipes nonsense 2>/dev/full", 2),
        ("pods recipes --nonsense 2>&-", 2),
    ],
)
def test_closed_streams_change_no_exit_code(command, code):
    done = shell(command)
    assert (done.returncode, done.stderr) == (code, "")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path):
    source = tmp_path / "r.jsonl"
    source.write_text(ROWS)
    assert shell(f"pods select {source} -m 2 --output {tmp_path}/k.jsonl <&- >&- 2>&-").returncode == 0
    assert len((tmp_path / "k.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("command", ["recipes", "train --help"])
def test_a_reader_that_goes_away_ends_it_as_sigpipe_does(command):
    read, write = os.pipe()
    os.close(read)
    done = shell(f"pods {command}; echo $? >&2", stdout=write)
    os.close(write)
    assert done.stderr == "141\n"


def test_a_full_disk_is_a_line():
    done = shell("pods recipes > /dev/full")
    assert done.returncode == 1
    assert re.fullmatch("Error: .*\n", done.stderr)


def test_text_that_the_encoding_lacks_is_escaped(tmp_path):
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    recipe = tmp_path / "日本.yaml"
    shipped = shipped_recipes()["tiny-pods"].read_text(encoding="utf-8")
    recipe.write_text(shipped + "\nsystem_prompt: think 日本\n", encoding="utf-8")
    done = shell(f"pods train --config {recipe} --dry-run", **environment)
    assert done.returncode == 0
    assert re.fullmatch(PROGRESS, done.stderr)
    assert r"think \u65e5\u672c" in done.stdout
    done = shell(f"pods train --config {recipe}2", **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
