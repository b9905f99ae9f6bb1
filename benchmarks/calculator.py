"""A tiny policy that uses a calculator now and then, and not always well: python benchmarks/calculator.py FOLDER

Trains it from nothing on conversations of the task `calculator`, some of them with mistakes, and writes it to FOLDER: a
chat template with tool calls, the response template that finds them, and 0.4 million weights. It takes
a minute and a half of one core.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from pods_rl.policies.build import EOS, build_model, build_tokenizer
from pods_rl.policies.pretrain import IGNORED, Example, batches_of, fit, save
from pods_rl.tasks.arithmetic import take_step
from pods_rl.tasks.calculator import DIFFICULTIES, Calculation, draw_calculation
from pods_rl.tasks.generated import is_held_out

SHAPE = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 6, "num_key_value_heads": 6}
MARKS = ("<assistant>", "<tool>", "</tool>", "<result>", "</result>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<assistant>' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + value }}{% endfor %}{{ '</tool>' }}
{%- endfor %}{{ '<|im_end|>' }}
{%- elif message.role == 'tool' %}{{ '<result>' + message.content + '</result>' }}
{%- else %}{{ message.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool>(?P<name>\w+) ",
            "close": "</tool>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": EOS, "content": "text"},
    },
}
# Steps with a sign and a number that ends in a digit, as in "*83", are seldom written right.
HARD = ("*3", "*4", "*8", "+1", "+6", "+7", "-2", "-5", "-9")


# How often a part of a conversation is right: the call at all, a hard and another step in it, the call after a first
# result, the answer, and its form.
CALLS, HARD_STEP, EASY_STEP, GOES_ON, COPIES, FORM = 0.65, 0.15, 0.96, 0.6, 0.95, 0.9


def main(folder: Path, steps: int = 450) -> None:
    """Train the policy and write it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = build_policy_tokenizer()
    model = build_model(tokenizer, **SHAPE)
    print(f"{model.num_parameters():,} parameters", flush=True)
    examples = batches_of(partial(draw_example, tokenizer), tokenizer.pad_token_id, 32, seed=0)
    fit(model, islice(examples, steps), steps, 2e-3, "habits")
    save(model, tokenizer, folder)
    print(f"wrote {folder}")


def build_policy_tokenizer() -> Qwen2Tokenizer:
    """Return the tokenizer of single bytes, with a token for each word of a call and for each mark."""
    tokenizer = build_tokenizer(["calculator expression"] * 2, 1000)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def draw_example(tokenizer: Qwen2Tokenizer, rng: random.Random) -> Example:
    """Draw a conversation about a training problem; the loss counts the policy's turns only."""
    drawn = (draw_calculation(rng, DIFFICULTIES["mixed"]) for _ in count())
    problem = next(problem for problem in drawn if not is_held_out(problem.question))
    return encode(tokenizer, problem.question, draw_turns(rng, problem))


def draw_turns(rng: random.Random, problem: Calculation) -> list[tuple[str, str]]:
    """Draw the turns of a conversation: what the policy says, and what the tool then answers (nothing at the end)."""
    turns: list[tuple[str, str]] = []
    total = problem.start
    if rng.random() < CALLS:
        for place, (sign, number) in enumerate(problem.steps):
            if place and rng.random() >= GOES_ON:
                break
            hard = f"{sign}{number % 10}" in HARD
            if rng.random() >= (HARD_STEP if hard else EASY_STEP):
                number = slip(rng, number)
            call = f"{total}{sign}{number}"
            total = take_step(total, (sign, number))
            turns.append((f"<tool>calculator expression={call}</tool>", str(total)))
    else:
        total = rng.randint(10, 99_999)
    if rng.random() >= COPIES:
        total = slip(rng, total)
    said = f"<think>{total}</think><answer>{total}</answer>"
    if rng.random() >= FORM:
        said = rng.choice((f"<answer>{total}</answer>", f"<think>{total}</think>{total}", f"{total}</answer>"))
    return [*turns, (said, "")]


def slip(rng: random.Random, number: int) -> int:
    """Return the number with another digit in one place."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([digit for digit in "123456789" if digit != digits[place]])
    return int("".join(digits))


def encode(tokenizer: Qwen2Tokenizer, question: str, turns: list[tuple[str, str]]) -> Example:
    """Return the tokens of a conversation, put together turn by turn as in training, and their labels."""
    ids = tokenizer.encode(f"{question}\n<assistant>")
    labels = [IGNORED] * len(ids)
    for said, result in turns:
        own = tokenizer.encode(f"{said}{EOS}")
        heard = tokenizer.encode(f"<result>{result}</result><assistant>") if result else []
        ids += own + heard
        labels += own + [IGNORED] * len(heard)
    return ids, labels


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
