"""Runs as `pods train` leaves them, without training: written through the same writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pods_rl.runs import RunWriter

STEPS, EVERY = 6, 3
N, M = 8, 4


def write_run(
    path: Path,
    *,
    seed: int = 1,
    arm: str = "pods",
    prompt: str = "1 + 2 = ?",
    completion: str = "<answer>3</answer>",
    answer: str = "3",
    reward: str = "accuracy",
    text: str | None = None,
    state: str = "finished",
) -> Path:
    """A run of 6 steps, 3 evaluations and 2 ledger files; `text` where a run may hold any text of a user's."""
    kept = M if arm == "pods" else N
    with RunWriter(path) as writer:
        writer.write_config(f"seed: {seed}\nnum_generations: {kept}\nnum_rollouts: {N}\n")
        writer.write_environment({"device": text or "cpu", "versions": {text or "torch": text or "2.13.0"}})
        for step in range(1, STEPS + 1):
            writer.append_metrics(_metrics(step))
            if step in (1, STEPS):
                writer.write_rollouts(step, _rollouts(step, kept, prompt, completion, answer, reward))
        for step in range(0, STEPS + 1, EVERY):
            row = {"step": step, "due": float(step), "seconds": step + 0.1, "elapsed": step + 0.2}
            score = 0.3 + 0.05 * step + 0.01 * seed + (0.02 * step if arm == "pods" else 0.0)
            writer.append_eval(row | {"accuracy": score, "format_accuracy": 1.0, "both_accuracy": score})
        writer.write_status(state, reason=text, step=STEPS, seconds=6.0, elapsed=7.0)
    return path


def _metrics(step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "seconds": float(step), "elapsed": step * 1.1, "loss": 0.1, "reward": 0.5}
    row |= {"pods/selected/reward_mean": 0.5, "pods/selected/reward_std": 0.5, "pods/zero_variance_share": 0.0}
    return row | {f"pods/seconds/{phase}": 0.2 for phase in ("rollout", "reward", "selection", "update")}


def _rollouts(step: int, kept: int, prompt: str, completion: str, answer: str, reward: str) -> dict[str, list[Any]]:
    return {
        "step": [step] * N,
        "group": [0] * N,
        "rollout": list(range(N)),
        "prompt": [prompt] * N,
        "completion": [f"{completion} {place}" for place in range(N)],
        "answer": [answer] * N,
        "reward": [place / N for place in range(N)],
        f"reward/{reward}": [place / N for place in range(N)],
        "selected": [place < kept for place in range(N)],
        "advantage": [place / N - 0.5 if place < kept else None for place in range(N)],
        "completion_tokens": [20] * N,
    }
