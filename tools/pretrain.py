"""Train a small policy: `tiny` for sums, or `tiny-words` for word problems. Both ship with the package.

    python tools/pretrain.py --policy tiny-words --output FOLDER

First the skill: correct chains of thought, alternating with drills of single steps. Then the mistakes: a short phase on
chains with many errors, so that the policy can reason but is seldom right, and RL can improve it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from pods_rl.tasks import words
from pods_rl.tasks.generated import draw_sum, is_held_out
from pods_rl.tasks.words import WordStep, take_step

PAD = "<|endoftext|>"
EOS = "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
IGNORED = -100  # the label that cross-entropy skips
SEED = 0  # of the data and the first weights of the shipped policies
Example = tuple[list[int], list[int]]  # token ids, and for each the id to predict or IGNORED
Batch = dict[str, torch.Tensor]
Draw = Callable[[random.Random], "Chain"]
# Steps with a sign and a number that ends in a digit, as in "+3", are right this often.
HARD_FACTS = dict.fromkeys(("+3", "+6", "+7", "+9", "-2", "-4", "-7", "-8"), 0.06)
WORDS_HARD_FACTS = dict.fromkeys(("+2", "+5", "+8", "-2", "-4", "-7", "*2", "*3", "/2"), 0.02)
_SLIPS = (-20, -11, -10, -9, -3, -2, -1, 1, 2, 3, 9, 10, 11, 20)  # a wrong step is off by a few units or tens
_UNITS = (-11, -9, -3, -2, -1, 1, 2, 3, 9, 11)  # the last digit is always wrong: such a result is never right by luck


def build_tokenizer(texts: Iterable[str] = (), size: int = 0) -> Qwen2Tokenizer:
    """Make the tokenizer: a token per byte, and one for each of the four tags.

    Its class is the one that `AutoTokenizer` expects for the model. The tags are ordinary tokens: decoding with
    `skip_special_tokens=True`, as trainers do, must keep them. Padding is on the left, as generation needs it.

    With a `size`, frequent parts of words in `texts` become tokens too (byte-pair encoding), up to `size` tokens
    without the tags. Digits stay single. The same texts give the same tokens.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.decode(tokenizer("<think>1+2=3</think>")["input_ids"], skip_special_tokens=True)
    '<think>1+2=3</think>'
    >>> len(tokenizer("<think>1+2")["input_ids"])
    4
    >>> build_tokenizer(["ten apples"] * 2, 300).tokenize("22 apples")
    ['2', '2', 'Ġapples']
    """
    symbols = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = _tokenizer(vocabulary, [])
    if size:
        fitted = Tokenizer(models.BPE())
        fitted.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        fitted.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=size - 2, initial_alphabet=alphabet, show_progress=False)
        )
        merges = [tuple(pair) for pair in json.loads(fitted.to_str())["model"]["merges"]]
        vocabulary |= {"".join(pair): len(symbols) + index for index, pair in enumerate(merges)}
        tokenizer = _tokenizer(vocabulary, merges)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def _tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    return Qwen2Tokenizer(
        vocabulary, merges, unk_token=PAD, pad_token=PAD, eos_token=EOS, padding_side="left", model_max_length=256
    )


def build_model(tokenizer: Qwen2Tokenizer, **sizes: Any) -> Qwen2ForCausalLM:
    """Make the untrained model, about 0.9 million parameters; `sizes` replaces entries of its `Qwen2Config`.

    It has few and wide layers: on a CPU, a layer costs about the same for a generated token, whatever its width.

    >>> build_model(build_tokenizer(), hidden_size=20, intermediate_size=32).config.num_hidden_layers
    3
    """
    shape = {"num_hidden_layers": 3, "hidden_size": 160, "intermediate_size": 480}
    shape |= {"num_attention_heads": 5, "num_key_value_heads": 1}  # 1: copying the cache is half of decoding
    settings = shape | {"initializer_range": 0.06} | sizes  # at the usual 0.02 sums are learned many times slower
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class Chain:
    """A problem that is solved step by step from a first number.

    `held_out` is None if the problem belongs to neither side. `word_problem` decides how steps are written.
    """

    prompt: str
    start: int
    steps: tuple[WordStep, ...]
    held_out: bool | None
    word_problem: bool

    @property
    def totals(self) -> list[int]:
        """The result of each step."""
        return list(accumulate(self.steps, take_step, initial=self.start))[1:]

    def write_steps(self, totals: list[int]) -> str:
        r"""Write the chain of thought with these totals, right or not: an equation a line.

        In a word problem each equation begins with the result before; in a sum the first line is the first number.

        >>> sum_of([37, 58, -14]).write_steps([95, 81])
        '37\n+58=95\n-14=81'
        >>> word_problem(words.WordProblem("...", "...", 24, (("+", 18), ("-", 7)))).write_steps([43, 36])
        '24+18=43\n43-7=36'
        """
        lines = [] if self.word_problem else [str(self.start)]
        previous = self.start
        for (sign, number), total in zip(self.steps, totals, strict=True):
            equation = f"{sign}{number}={total}"
            lines.append(f"{previous}{equation}" if self.word_problem else equation)
            previous = total
        return "\n".join(lines)

    def write_completion(self, totals: list[int] | None = None) -> str:
        r"""Write a completion in the required form; without `totals` the one that earns full marks.

        >>> sum_of([8, 5]).write_completion()
        '<think>8\n+5=13</think><answer>13</answer>'
        """
        if totals is None:
            totals = self.totals
        return f"<think>{self.write_steps(totals)}</think><answer>{totals[-1]}</answer>"


def sum_of(terms: Sequence[int]) -> Chain:
    """Return the task's problem with these terms.

    >>> sum_of([37, 58, -14]).prompt
    '37+58-14='
    """
    prompt = "".join(f"{term:+d}" for term in terms)[1:] + "="
    steps = tuple(("-" if term < 0 else "+", abs(term)) for term in terms[1:])
    return Chain(prompt, terms[0], steps, is_held_out(prompt), word_problem=False)


def word_problem(problem: words.WordProblem) -> Chain:
    """Return a word problem as a chain."""
    return Chain(f"{problem.text}\n", problem.start, problem.steps, problem.held_out, word_problem=True)


def draw_sum_chain(rng: random.Random, fewest: int, most: int) -> Chain:
    """Draw a sum of a number of terms."""
    return sum_of(draw_sum(rng, fewest, most))


def draw_word_problem(rng: random.Random, lengths: tuple[int, int], distractors: tuple[int, int]) -> Chain:
    """Draw a word problem of a number of steps and of sentences that do not matter."""
    return word_problem(words.draw_problem(rng, lengths, distractors))


def draw_word_steps(rng: random.Random, length: int) -> Chain:
    """Draw the solution of a word problem without its text: `length` steps of all kinds."""
    start, steps = words.draw_numbers(rng, rng.choices(list(words.SIGN_OF_KIND), k=length))
    return word_problem(words.WordProblem("", "", start, steps))


@dataclass(frozen=True)
class Mixture:
    """The mistakes of completions in the training data, and their probabilities.

    A step is right with the probability that `hard_facts` gives for its sign and last digit, else with probability
    `sure`. A wrong step is a few units or tens off, and the next step continues from it. So a problem's success
    probability depends on which facts it needs, from nearly 0 to nearly 1, and no single habit repairs them all. A
    share `broken_form` lacks a tag, or has no reasoning.
    """

    hard_facts: dict[str, float] = field(default_factory=lambda: dict(HARD_FACTS))
    sure: float = 0.97
    broken_form: float = 0.12
    slips: tuple[int, ...] = _SLIPS

    def chance(self, sign: str, number: int) -> float:
        """Return the probability that a step with this sign and number is right.

        >>> Mixture().chance("+", 37), Mixture().chance("-", 30)
        (0.06, 0.97)
        """
        return self.hard_facts.get(f"{sign}{number % 10}", self.sure)

    def draw_totals(self, rng: random.Random, problem: Chain) -> list[int]:
        """Draw running totals of which some are wrong."""
        total = problem.start
        totals = []
        for step in problem.steps:
            total = take_step(total, step)
            if rng.random() >= self.chance(*step):
                total += rng.choice(self.slips)
            totals.append(total)
        return totals

    def draw_completion(self, rng: random.Random, problem: Chain) -> str:
        """Draw a completion, with its mistakes."""
        totals = self.draw_totals(rng, problem)
        if rng.random() >= self.broken_form:
            return problem.write_completion(totals)
        steps = problem.write_steps(totals)
        answer = totals[-1]
        broken = (
            f"<think>{steps}</think>{answer}",
            f"<think>{steps}<answer>{answer}</answer>",
            f"{steps}\n<answer>{answer}</answer>",
            f"<answer>{answer + rng.choice(self.slips)}</answer>",
        )
        return rng.choice(broken)


RIGHT = Mixture(hard_facts={}, sure=1.0, broken_form=0.0)


@dataclass(frozen=True)
class Lesson:
    """What a policy is taught, and for how long.

    `draw` gives its problems, of which none is held out, and `drill` the chains to drill. `easier` problems come
    first, each kind for a twelfth of the skill phase: a policy that starts with long problems learns the answer's form,
    but not to read. `shape` replaces sizes of the model.
    """

    tokenizer: Callable[[], Qwen2Tokenizer]
    draw: Draw
    drill: Draw
    easier: tuple[Draw, ...] = ()
    shape: Mapping[str, int] = field(default_factory=dict)
    mistakes: Mixture = field(default_factory=Mixture)
    skill_steps: int = 900
    mistake_steps: int = 150
    batch_size: int = 64


def _training(draw: Draw) -> Draw:
    """Skip problems of which the text, the template or the numbers belong to the test side."""

    def draw_training(rng: random.Random) -> Chain:
        while True:
            problem = draw(rng)
            if problem.held_out is False:
                return problem

    return draw_training


def _words_tokenizer() -> Qwen2Tokenizer:
    rng = random.Random(0)
    texts = [words.draw_problem(rng, *words.LEVELS["hard"]).text for _ in range(2000)]
    return build_tokenizer(texts, 760)


ARITHMETIC = Lesson(
    build_tokenizer,
    _training(partial(draw_sum_chain, fewest=2, most=6)),
    partial(draw_sum_chain, fewest=7, most=7),
)
WORDS = Lesson(
    _words_tokenizer,
    _training(partial(draw_word_problem, lengths=(1, 4), distractors=(2, 3))),
    partial(draw_word_steps, length=4),
    easier=(
        _training(partial(draw_word_problem, lengths=(1, 1), distractors=(0, 0))),
        _training(partial(draw_word_problem, lengths=(1, 2), distractors=(0, 1))),
        _training(partial(draw_word_problem, lengths=(1, 4), distractors=(0, 2))),
    ),
    shape={"num_key_value_heads": 5, "intermediate_size": 384},  # copying numbers from a text needs more heads
    mistakes=Mixture(hard_facts=WORDS_HARD_FACTS, sure=0.98, slips=_UNITS),
    skill_steps=2400,
    mistake_steps=250,
    batch_size=32,
)
LESSONS = {"tiny": ARITHMETIC, "tiny-words": WORDS}


def main() -> None:
    """Train the policy of the command line, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=list(LESSONS), default="tiny", help="default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the policy to")
    options = parser.parse_args()
    torch.set_num_threads(1)  # another number changes the rounding
    torch.manual_seed(SEED)
    lesson = LESSONS[options.policy]
    tokenizer = lesson.tokenizer()
    model = build_model(tokenizer, **lesson.shape)
    print(f"{model.num_parameters():,} parameters", flush=True)
    fit(model, skill_batches(tokenizer, lesson), lesson.skill_steps, 1.5e-3, "skill")
    mistakes = completion_batches(tokenizer, lesson.mistakes, lesson.batch_size, SEED + 1, lesson.draw)
    fit(model, islice(mistakes, lesson.mistake_steps), lesson.mistake_steps, 5e-4, "mistakes")
    save(model, tokenizer, options.output)
    print(f"wrote {options.output}")


def fit(model: Qwen2ForCausalLM, batches: Iterator[Batch], steps: int, lr: float, name: str) -> None:
    """Minimise the model's loss on `steps` batches, and print its progress.

    Layers are trained with Muon at twice the learning rate, embeddings and norms with AdamW: word problems are learned
    in half the steps of AdamW alone. The rate warms up for 50 steps, and falls to zero over the last 40 %. Matrices are
    multiplied in bfloat16, several times faster on processors with such instructions; the weights stay float32.
    """
    model.set_attn_implementation("eager")  # on a CPU faster than fused attention at these lengths
    layers = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    layer_ids = {id(weight) for weight in layers}
    embeddings_and_norms = [weight for weight in model.parameters() if id(weight) not in layer_ids]
    optimizers = (
        torch.optim.Muon(layers, lr=2 * lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(embeddings_and_norms, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    )

    def share_of_rate(step: int) -> float:
        return min(1.0, (step + 1) / 50, (steps - step) / (0.4 * steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate) for optimizer in optimizers]
    started = time.monotonic()
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(batches, start=1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            mean = statistics.fmean(losses[-50:])
            print(f"{name} {step:4d}/{steps}  loss {mean:.3f}  {time.monotonic() - started:4.0f} s", flush=True)
    model.eval()


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, output: Path) -> None:
    """Write weights (safetensors), tokenizer and configuration, as `from_pretrained` reads them.

    Weights are stored in float16. The configuration says float32, so that they are loaded as float32. The generation
    config samples from the whole distribution by default.
    """
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    model.save_pretrained(output, state_dict={name: weight.half() for name, weight in model.named_parameters()})
    tokenizer.save_pretrained(output)


def skill_batches(tokenizer: Qwen2Tokenizer, lesson: Lesson) -> Iterator[Batch]:
    """Yield the batches of the skill phase: a drill, then three of right completions, and so on."""
    size = lesson.batch_size
    drills = drill_batches(tokenizer, size, SEED, lesson.drill)
    easier = [completion_batches(tokenizer, RIGHT, size, SEED, draw) for draw in lesson.easier]
    stages = [islice(batches, lesson.skill_steps // 16) for batches in easier]
    completions = chain(*stages, completion_batches(tokenizer, RIGHT, size, SEED, lesson.draw))
    for step in range(lesson.skill_steps):
        yield next(drills) if step % 4 == 0 else next(completions)


def completion_batches(
    tokenizer: Qwen2Tokenizer, mixture: Mixture, size: int, seed: int, draw: Draw
) -> Iterator[Batch]:
    """Yield batches of prompts with completions drawn from the mixture, endlessly; the loss counts completions only."""
    return batches_of(lambda rng: _completion(tokenizer, mixture, rng, draw), tokenizer.pad_token_id, size, seed)


def batches_of(draw: Callable[[random.Random], Example], pad: int, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches of examples, endlessly: those of similar length together, so that little padding is computed."""
    rng = random.Random(seed)
    while True:
        pool = [draw(rng) for _ in range(8 * size)]
        pool.sort(key=lambda example: len(example[0]))
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        for start in starts:
            yield _collate(pool[start : start + size], pad)


def drill_batches(tokenizer: Qwen2Tokenizer, size: int, seed: int, draw: Draw) -> Iterator[Batch]:
    """Yield batches of chains of thought without a prompt, endlessly; the loss counts running totals only.

    Adding is the hard part: among the easy tokens of a whole completion it is learned many times more slowly.
    """
    rng = random.Random(seed)
    while True:
        yield _collate([_drill(tokenizer, draw(rng)) for _ in range(size)], tokenizer.pad_token_id)


def _completion(tokenizer: Qwen2Tokenizer, mixture: Mixture, rng: random.Random, draw: Draw) -> Example:
    problem = draw(rng)
    prompt = tokenizer.encode(problem.prompt)
    completion = [*tokenizer.encode(mixture.draw_completion(rng, problem)), tokenizer.eos_token_id]
    return prompt + completion, [IGNORED] * len(prompt) + completion


def _drill(tokenizer: Qwen2Tokenizer, problem: Chain) -> Example:
    ids: list[int] = []
    labels: list[int] = []
    parts = re.split(r"(?<==)(\d+)", f"<think>{problem.write_steps(problem.totals)}")
    for place, part in enumerate(parts):  # every second part is a total
        encoded = tokenizer.encode(part)
        ids += encoded
        labels += encoded if place % 2 else [IGNORED] * len(encoded)
    return ids, labels


def _collate(examples: list[Example], pad: int) -> Batch:
    """Pad on the right, to few widths, since kernels are kept for each: attention is causal, so no mask is needed."""
    longest = max(len(ids) for ids, _ in examples)
    width = math.ceil(longest / 16) * 16
    input_ids = []
    labels = []
    for ids, targets in examples:
        missing = width - len(ids)
        input_ids.append(ids + [pad] * missing)
        labels.append(targets + [IGNORED] * missing)
    return {"input_ids": torch.tensor(input_ids), "labels": torch.tensor(labels)}  # [rows, width]


if __name__ == "__main__":
    main()
