"""Runs whose numbers are made up and whose files `RunWriter` writes: what the report reads, without a training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from tests.reliability.payloads import scripts

from pods_rl.report import ReportFiles, build_report, live
from pods_rl.runs import RunWriter

PHASES = {"grpo": (0.10, 0.004, 0.0, 0.09), "pods": (0.19, 0.016, 0.0002, 0.09)}
RATES = {"grpo": 0.6, "pods": 1.5}

PAYLOADS = scripts("https://example.invalid")


def write_run(
    path, arm="pods", seed=0, config=None, rate=None, end=150.0, state="finished", reason=None, rollouts=0, noise=0.012
):
    """A run that learns along 1 - exp(-t), evaluated every 15 seconds until ``end``."""
    random = np.random.default_rng([seed, *arm.encode()])
    eval_random = np.random.default_rng([seed, 1])
    rate = RATES.get(arm, 1.0) if rate is None else rate
    n, m = (16, 16) if arm == "grpo" else (64, 16)
    settings = {"num_rollouts": n, "num_generations": m, "rule": "max_variance", "seed": seed, "lr": 1e-5}
    about = {"device": "cpu", "precision": "bfloat16", "seed": seed, "versions": {"torch": "2.13.0"}}
    costs = PHASES.get(arm, PHASES["pods"])
    step_seconds = sum(costs) + 0.01
    steps = int(end / step_seconds)

    def accuracy(t: float) -> float:
        return 0.30 + 0.52 * (1 - np.exp(-rate * t / 40))

    with RunWriter(path) as writer:
        writer.write_config(json.dumps(settings | (config or {})))
        writer.write_environment(about)
        for step in range(1, steps + 1, 7):
            t = step * step_seconds
            row = {"step": step, "seconds": t, "elapsed": t * 1.2, "reward": accuracy(t) + random.normal(0, 0.1)}
            row |= {"num_tokens": 500.0 * step, "loss": 0.1 * seed + 1 / step}
            row |= {"pods/selected/reward_mean": 0.55 + random.normal(0, 0.05), "pods/zero_variance_share": t / 500}
            phases = zip(("rollout", "reward", "selection", "update"), costs, strict=True)
            row |= {f"pods/seconds/{name}": cost for name, cost in phases}
            writer.append_metrics(row)
        for due in np.arange(0, end + 1e-9, 15):
            seconds = due + eval_random.uniform(0, step_seconds) * (due > 0)
            score = accuracy(seconds) + eval_random.normal(0, noise)
            row = {"step": int(seconds / step_seconds), "due": due, "seconds": seconds, "accuracy": score}
            row |= {"format_accuracy": min(1.0, score + 0.1), "both_accuracy": score - 0.02}
            writer.append_eval(row)
        writer.write_status(state, reason=reason, step=steps, seconds=end, elapsed=end * 1.2)
    for step in range(1, rollouts + 1):
        write_rollouts(path, step * 20, n=n, m=m, random=random)
    return path


def write_rollouts(path, step, *, n, m, random, groups=2, text=None, prompt="What is 12 + 7 - 3?", rewards=None):
    rows = []
    given = rewards
    for group in range(groups):
        rewards = np.where(random.random(n) < 0.4, 1.0, 0.0) + random.integers(0, 5, n) * 0.025
        rewards = rewards if given is None else given
        order = np.argsort(-rewards, kind="stable")
        kept = {*order[: m // 2].tolist(), *order[n - (m - m // 2) :].tolist()}
        for rollout in range(n):
            completion = text or f"<think>12 + 7 = 19; 19 - 3 = {random.integers(10, 30)}</think><answer>16</answer>"
            is_kept = rollout in kept
            row = {"step": step, "group": group, "rollout": rollout, "prompt": prompt, "completion": completion}
            row |= {"answer": "16", "reward": float(rewards[rollout]), "selected": is_kept}
            row |= {"reward/accuracy": float(rewards[rollout] >= 1), "reward/format": float(rewards[rollout] % 1)}
            row |= {"advantage": float(rewards[rollout] - 0.5) if is_kept else None, "completion_tokens": 9}
            rows.append(row)
    with RunWriter(path, resume=True) as writer:
        writer.write_rollouts(step, {name: [row[name] for row in rows] for name in rows[0]})


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return write_experiment(tmp_path / "quickstart")


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """The report of the same experiment, made once: for tests that only read it."""
    return build_report(write_experiment(tmp_path_factory.mktemp("report") / "quickstart"))


def write_experiment(root: Path) -> Path:
    """Two arms of three seeds; one PODS run died on the way."""
    for arm in ("grpo", "pods"):
        for seed in range(3):
            died = {"end": 70, "state": "failed", "reason": "out of memory"} if (arm, seed) == ("pods", 2) else {}
            write_run(root / arm / f"seed-{seed}", arm, seed, rollouts=3, **died)
    return root


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """Payloads in prompts, completions, arm and run names, reasons, settings, the environment and metrics."""
    root = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=document.title=1>"
    arms = ["grpo", *(f"arm {payload.replace('/', '∕')}".replace("\x00", "") for payload in PAYLOADS)]
    for arm, payload in zip(arms, ["", *PAYLOADS], strict=True):
        path = root / arm / f"seed-0 {arm[:40]}"
        write_run(path, arm, config={f"key {payload}": payload, "rule": payload}, reason=payload, state=f"s {payload}")
        about = {"device": payload, f"key {payload}": {payload: payload}}
        (path / "environment.json").write_text(json.dumps(about))
        random = np.random.default_rng(0)
        write_rollouts(path, 1, n=4, m=2, random=random, groups=1, text=payload or "x", prompt=payload or "x")
    return build_report([root], root.parent / "out")


def grow(run: Path, due: float, accuracy: float) -> None:
    """Another step and evaluation."""
    with RunWriter(run, resume=True) as writer:
        writer.append_metrics({"step": int(due * 5), "seconds": due, "reward": accuracy})
        writer.append_eval({"step": int(due * 5), "due": due, "seconds": due, "accuracy": accuracy})


@contextmanager
def serving(page: Any) -> Iterator[int]:
    with live.server(page, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
