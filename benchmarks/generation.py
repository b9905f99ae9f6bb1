"""Each prompt once in generation, against `generate`: python benchmarks/generation.py [--vllm] [--repeats 9]

64 rollouts on the embedded policy, on one thread; the two arms alternate. Goals of generate's time over ours:

1. 30 tokens after prompts of 12, 60 and 200 tokens              >= 1.5, 2.3, 4.5
2. one row in eight 120 tokens, the others 30 (prompt of 60)     >= 1.5 times less with ended rows dropped
3. peak memory above what was held before                        ours / generate's <= 1.0

No row ends by chance: the end token is one that the policy does not have, and in 2 a stopping criterion, the same for
both arms, ends the rows of one prompt after 30 tokens. Times are of the process, so that other work disturbs less.

--vllm adds vLLM to 1 (in bf16, its choice; it shares the prompt, whose cache is emptied before each repeat). In the
environment of `make test-vllm`: VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
VLLM_CPU_OMP_THREADS_BIND=nobind .venv-vllm/bin/python benchmarks/generation.py --vllm
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList, logging

from pods_rl.policies import tiny_policy_path
from pods_rl.rollouts.generating import LiveRows, complete
from pods_rl.rollouts.sampling import RowDraws

ROWS, SHORT, LONG, NEVER = 64, 30, 120, 10**6
GOALS = {12: 1.5, 60: 2.3, 200: 4.5}
SKEWED = (60, True)  # prompt length, and that one row in eight is long


class Early(StoppingCriteria):
    """Ends rows whose prompt begins with token 10 after `SHORT` tokens."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        short = input_ids[:, 0] == 10
        return short & (input_ids.size(1) - self._prompt >= SHORT)


class VLLM:
    """vLLM with the same policy, in this process."""

    def __init__(self) -> None:
        vllm = import_module("vllm")
        self._engine = vllm.LLM(str(tiny_policy_path()), max_num_seqs=ROWS, max_num_batched_tokens=4096)
        self._params = vllm.SamplingParams(temperature=1.0, max_tokens=SHORT, ignore_eos=True)

    def generate(self, ids: list[list[int]]) -> None:
        self._engine.reset_prefix_cache()
        prompts = [{"prompt_token_ids": row} for row in ids]
        self._engine.generate(prompts, self._params, use_tqdm=False)


class Case:
    """One batch: its prompt length, and whether one row in eight is long."""

    def __init__(self, model: Any, prompt: int, skewed: bool) -> None:
        self._model = model
        self.ids = ids = torch.randint(11, 200, (1, prompt), generator=torch.Generator().manual_seed(0)).repeat(ROWS, 1)
        ids[:, 0] = 10
        ids[::8, 0] = 11 if skewed else 10
        length = LONG if skewed else SHORT
        config = GenerationConfig(
            max_new_tokens=length, do_sample=True, top_k=0, eos_token_id=NEVER, pad_token_id=0, disable_compile=True
        )
        criteria = StoppingCriteriaList([Early(prompt)] if skewed else [])
        self._inputs = {"input_ids": ids, "generation_config": config, "stopping_criteria": criteria}
        self._length = length

    def theirs(self) -> None:
        self._model.generate(**self._inputs)

    def kept(self) -> None:
        """Ours, but ended rows stay in the batch."""
        drop, LiveRows.drop_ended = LiveRows.drop_ended, lambda *_: None  # type: ignore[method-assign]
        try:
            self.ours()
        finally:
            LiveRows.drop_ended = drop  # type: ignore[method-assign]

    def ours(self) -> None:
        draws = RowDraws([(0, row) for row in range(ROWS)], self._length, strict=True)
        complete(self._model.generate, self._inputs, draws)


def seconds(work: Any) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def peak(work: Any) -> int:
    """Bytes of tensors at the peak, above what was held: the highest running sum of the allocator's events."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    held = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, least and greatest of a / b."""
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_path()).eval()
    cases = {(prompt, False): Case(model, prompt, False) for prompt in GOALS} | {SKEWED: Case(model, *SKEWED)}
    times: dict[tuple[int, bool], list[tuple[float, float]]] = {key: [] for key in cases}
    dropping: list[tuple[float, float]] = []
    engine = VLLM() if options.vllm else None
    against: dict[int, list[tuple[float, float]]] = {prompt: [] for prompt in GOALS if engine}
    for repeat in range(options.repeats + 1):
        for key, case in cases.items():
            pair = (seconds(case.theirs), seconds(case.ours))
            if repeat:  # the first is a warm-up
                times[key].append(pair)
                if key == SKEWED:
                    dropping.append((seconds(case.kept), pair[1]))
            if engine and key != SKEWED:
                third = seconds(partial(engine.generate, case.ids.tolist()))
                against[key[0]] += [(third, pair[1])] if repeat else []
    results: dict[str, tuple[float, float, float, str]] = {}
    for prompt, goal in GOALS.items():
        results[f"prompt {prompt}: generate / ours"] = (*ratio(times[prompt, False]), f">= {goal}")
    for prompt, pairs in against.items():
        results[f"prompt {prompt}: vLLM / ours"] = (*ratio(pairs), "")
    results[f"prompt {SKEWED[0]}, skewed: generate / ours"] = (*ratio(times[SKEWED]), "")
    results[f"prompt {SKEWED[0]}, skewed: rows kept / rows dropped"] = (*ratio(dropping), ">= 1.5")
    for (prompt, skewed), case in cases.items():
        share = peak(case.ours) / peak(case.theirs)
        lengths = "skewed" if skewed else "equal"
        results[f"prompt {prompt}, {lengths}: peak memory, ours / generate's"] = (share, share, share, "<= 1.0")
    print(f"{ROWS} rows, {options.threads} thread(s), {options.repeats} alternating repeats\n")
    print(f"{'seconds (median)':<54}{'generate':>10}{'ours':>8}" + f"{'vLLM':>8}" * bool(engine))
    for (prompt, skewed), pairs in times.items():
        name = f"prompt {prompt}, {'one row in eight 120 tokens' if skewed else '30 tokens'}"
        theirs, ours = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        third = statistics.median(pair[0] for pair in against[prompt]) if engine and not skewed else None
        print(f"{name:<54}{theirs:>10.3f}{ours:>8.3f}" + (f"{third:>8.3f}" if third else ""))
    print(f"\n{'ratio':<54}{'median':>8}{'min':>8}{'max':>8}   goal")
    for name, (median, low, high, goal) in results.items():
        print(f"{name:<54}{median:>8.2f}{low:>8.2f}{high:>8.2f}   {goal}")
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "ratios": results}, indent=1))


if __name__ == "__main__":
    main()
