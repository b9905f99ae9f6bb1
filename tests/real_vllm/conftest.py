"""What the cases saw, each in processes of its own, and a server of vLLM next to them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import DEADLINE, free_port

from . import TINY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """The variables of every process with vLLM: one thread, no compilation, engines in the process, our plugin."""
    folder = tmp_path_factory.mktemp("plugins")
    plugin = folder / "pods_rl_tests-0.dist-info"  # as pip would install it
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: pods-rl-tests\nVersion: 0\n")
    entry = "pods_rl_tests = tests.real_vllm.plugin:register"
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where the cases leave what they saw."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="session")
def server(environment, folder) -> Iterator[str]:
    """The address of a server of the shipped policy, which loads while the other cases run."""
    with serve(environment, folder / "server.txt") as (url, _):
        yield url


@contextmanager
def serve(environment: dict[str, str], output: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of the shipped policy: its address and its process."""
    port = free_port()
    settings = {
        "--model": TINY, "--port": port, "--host": "127.0.0.1", "--max-num-seqs": 128, "--max-logprobs": -1,
        "--logprobs-mode": "processed_logprobs",
    }  # fmt: skip
    with output.open("w") as log:
        process = subprocess.Popen(
            # `vllm serve`, which looks for a distribution of the name `vllm`
            [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
            + [str(word) for pair in settings.items() for word in pair],
            env=environment | {"VLLM_SERVER_DEV_MODE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)  # with its engine
            process.wait()


@pytest.fixture(scope="session")
def saw(environment, folder, server) -> Callable[[str], list[dict[str, Any]]]:
    """Runs all cases once; what each process of a case saw."""
    with (folder / "cases.txt").open("w+") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.real_vllm.cases", str(folder), server],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=9 * DEADLINE,  # each case has that long
            check=False,
        )

    def found(case: str) -> list[dict[str, Any]]:
        files = sorted(folder.glob(f"{case}-*.json"))
        assert files, (folder / "cases.txt").read_text()[-8000:] + (folder / "server.txt").read_text()[-4000:]
        return [json.loads(file.read_text()) for file in files]

    return found
