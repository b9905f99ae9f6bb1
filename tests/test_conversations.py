"""Evaluating tasks with tools and environments: the turns are TRL's, and every kind of end is graded."""

import asyncio
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken
from tools.pretrain import EOS, IGNORED, Example, batches_of, build_model, build_tokenizer, save
from transformers import Qwen2Tokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from pods_rl.errors import UserError
from pods_rl.evaluation import Completion, Sampling, evaluate
from pods_rl.evaluation.checkpoint import evaluate_checkpoint
from pods_rl.evaluation.conversation import converse
from pods_rl.loading.prompts import tool_options
from pods_rl.recipe import build_recipe
from pods_rl.tasks import Task
from pods_rl.training.run import train
from pods_rl.yaml_files import Origin

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from calculator import calculator, make_task

LENGTH = 120
TINY = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 1}
# A tokenizer with tool calls: its chat template writes them, its response template finds them.
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


async def half(number: str) -> str:
    """Halve a number.

    Args:
        number: to halve.
    """
    await asyncio.sleep(0)
    return str(int(number) / 2)


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of single bytes, with a token for each word of a call and for each mark."""
    tokenizer = build_tokenizer(["calculator expression"] * 2, 1000)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


class Script:
    """A sampler that says given turns, row by row, and keeps what it was asked."""

    backend, dtype = "generate", torch.float32

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.asked = tokenizer, [[*row, *[f"no{EOS}"] * 9] for row in turns], []

    def sample(self, prompts_ids, rows, how, done):
        self.asked.append((list(rows), how.max_completion_length))
        return [self.say(row % 2**32, how.max_completion_length) for row in rows]

    def say(self, row, most):
        ids = self.tokenizer.encode(self.turns[row].pop(0))
        kept = ids[:most]
        ended = len(kept) == len(ids) and ids[-1] == self.tokenizer.eos_token_id
        return Completion(self.tokenizer.decode(kept), len(kept), ended, kept)


def call(expression, tool="calculator", key="expression"):
    return f"<tool>{tool} {key}={expression}</tool>"


SCRIPTS = {
    "no call": [f"<answer>7</answer>{EOS}"],
    "a call": [call("3*4") + EOS, f"<think>12</think><answer>12</answer>{EOS}"],
    "a last turn longer than what is left, shorter than its neighbour's room": [
        "1" * 60 + call("3*4") + EOS,
        "2" * 50 + EOS,
    ],
    "a result that fills what is left": ["1" * (LENGTH - 14) + call("3*4") + EOS],
    "two calls in a turn, one a coroutine": [call("9", "half", "number") + call("3*4") + EOS, f"12 and 4.5{EOS}"],
    "a call that fails": [call("three times four") + EOS, f"no{EOS}"],
    "an unknown tool": [call("1", "search", "query") + EOS, f"no{EOS}"],
    "never an answer": [call("3*4") + EOS] * 9,
    "a last turn that is too long": [call("3*4") + EOS, "1" * LENGTH],
    "a result that does not fit": ["1" * (LENGTH - 12) + call("3*4")[:-1] + f"</tool>{EOS}"],
    "a call that is truncated": ["1" * (LENGTH - 5) + call("3*4") + EOS],
}


def trls(tokenizer, turns, prompt, monkeypatch, most_turns=None):
    """The same conversation by TRL's own loop: tokens, messages, and which tokens are the policy's."""
    trainer = object.__new__(GRPOTrainer)
    loop = asyncio.new_event_loop()
    vars(trainer).update(
        tools=[calculator, half], environment_factories=None, use_vllm=False, chat_template=None, _is_vlm=False,
        chat_template_kwargs={}, processing_class=tokenizer, _tokenizer=tokenizer, async_loop=loop,
        max_tool_calling_iterations=sys.maxsize if most_turns is None else most_turns, max_completion_length=LENGTH,
        _sync_tool_dicts=[{"calculator": calculator}], _async_tool_dicts=[{"half": half}],
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096)),
    )  # fmt: skip
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", lambda c, loop: SimpleNamespace(
        result=lambda: loop.run_until_complete(c)))  # fmt: skip
    script = Script(tokenizer, [turns])
    monkeypatch.setattr(
        GRPOTrainer, "_generate_single_turn", lambda self, *_, **__: ([script.say(0, LENGTH).ids], None)
    )
    prompt_ids, images, fields = trainer._tokenize_prompts([prompt])
    completion_ids, logprobs = trainer._generate_single_turn(prompt_ids)
    completions = [[parse_response(tokenizer, completion_ids[0], prefix=prompt_ids[0], tools=trainer.tools)]]
    mask, completions, ids, *_ = trainer._tool_call_loop(
        [prompt], prompt_ids, completion_ids, completions, logprobs, images, fields
    )
    loop.close()
    return prompt_ids[0], ids[0], completions[0], sum(mask[0])


def task_of(rows, **settings):
    prompts = [[{"role": "user", "content": f"{row}?"}] for row in range(rows)]
    split = Dataset.from_dict({"prompt": prompts, "answer": ["12"] * rows})
    return Task("t", "1", split, split, {"accuracy": 1.0}, **settings)


def talk(task, sampler, **settings):
    options = tool_options(sampler.tokenizer, task)
    how = Sampling(max_completion_length=LENGTH, batch_size=5, chat_template_kwargs=options, **settings)
    return converse(sampler, task, list(task.test), range(len(task.test)), how, lambda rows, of: None)


def test_every_conversation_is_the_one_that_trls_loop_makes(tokenizer, monkeypatch):
    task = task_of(len(SCRIPTS), tools=(calculator, half))
    for most_turns in (None, 1, 0):
        script = Script(tokenizer, SCRIPTS.values())
        found = talk(task, script, tool_turns=most_turns)
        assert len({key for keys, _ in script.asked for key in keys}) == sum(len(keys) for keys, _ in script.asked)
        for row, (name, turns) in enumerate(SCRIPTS.items()):
            prompt = task.test[row]["prompt"]
            prompt_ids, ids, messages, own = trls(tokenizer, turns, prompt, monkeypatch, most_turns)
            mine = found[row]
            assert (mine.prompt_ids, mine.ids, mine.messages, mine.tokens) == (prompt_ids, ids, messages, own), name
            assert mine.ended == (ids[-1] == tokenizer.eos_token_id), name


def slow(number: str) -> str:
    """Take long.

    Args:
        number: unused.
    """
    while True:
        pass


def test_a_tool_that_takes_too_long_is_an_answer_to_read(tokenizer):
    turns = [[call("1", "slow", "number") + EOS]]
    (found,) = talk(task_of(1, tools=(slow,)), Script(tokenizer, turns), tool_timeout=0.05)
    assert [message["role"] for message in found.messages] == ["assistant", "tool", "assistant"]
    assert " 0.05 s" in found.messages[1]["content"]


class Guessing:
    """An environment: guess a number. It counts its own kind."""

    open = made = 0

    def __init__(self):
        Guessing.open += 1
        Guessing.made += 1

    def reset(self, answer, **row):
        self.answer, self.guesses = answer, []
        return f" of {sorted(row)}"

    def guess(self, number: str) -> str:
        """Guess.

        Args:
            number: what to guess.
        """
        self.guesses.append(number)
        if number == "stop":
            raise KeyboardInterrupt
        return "right" if number == self.answer else "wrong"

    async def get_reward(self):
        return float(self.answer in self.guesses)

    def close(self):
        Guessing.open -= 1


def test_an_environment_of_its_own_grades_each_conversation_and_is_closed(tokenizer):
    Guessing.open = Guessing.made = 0
    task = task_of(3, environment_factory=Guessing, answer="environment")
    turns = [[call(n, "guess", "number") + EOS, f"<think>.</think><answer>12</answer>{EOS}"] for n in ("11", "12", "1")]
    sampler = Script(tokenizer, turns)
    found = evaluate(sampler, task, Sampling(max_completion_length=LENGTH, batch_size=2))
    assert [answer.answer_right for answer in found.answers] == [False, True, False]
    assert found.scores["format_accuracy"] == 1
    assert found.answers[0].prompt == "0? of ['prompt']\n<assistant>"
    said = [(message["role"], message["content"]) for message in json.loads(found.answers[1].messages)]
    assert said == [("assistant", ""), ("tool", "right"), ("assistant", "<think>.</think><answer>12</answer>")]
    assert found.answers[1].completion_tokens == sum(len(tokenizer.encode(turn)) for turn in turns[1])
    assert (Guessing.made, Guessing.open) == (3, 0)  # one for each place of a batch; one described its tools


def test_without_a_grader_all_rewards_are_shown_as_training_gives_them(tokenizer):
    turns = [[call("12", "guess", "number") + EOS, f"12{EOS}"]]
    task = replace(task_of(1, environment_factory=Guessing, answer=None), rewards={"overlong": 0.1})
    (conversation,) = talk(task, Script(tokenizer, turns))
    how = Sampling(max_completion_length=len(conversation.ids))  # results count too
    scores = evaluate(Script(tokenizer, turns), task, how).scores
    assert (scores["reward/environment"], scores["reward/overlong"]) == (1.0, -1.0)
    assert scores["reward"] == pytest.approx(0.9)
    with_tools = replace(task, environment_factory=None, tools=(calculator,))
    assert "reward/environment" not in evaluate(Script(tokenizer, [[f"12{EOS}"]]), with_tools, how).scores


def test_environments_are_closed_after_an_interrupt(tokenizer):
    Guessing.open = Guessing.made = 0
    stop = [[call("stop", "guess", "number") + EOS]] * 3
    with pytest.raises(KeyboardInterrupt):
        talk(task_of(3, environment_factory=Guessing), Script(tokenizer, stop))
    assert Guessing.open == 0


def fail_if_asked(environment, method):
    """No method: each public one of an environment is a tool."""
    if method in environment.fails:
        raise SystemExit(3) if "exit" in environment.fails else KeyError("state")


class Faulty(Guessing):
    """An environment whose methods fail where a test says so."""

    fails: tuple[str, ...] = ()
    reward: object = 1.0

    def __init__(self):
        super().__init__()
        fail_if_asked(self, "__init__")

    def reset(self, **columns):
        fail_if_asked(self, "reset")

    def get_reward(self):
        fail_if_asked(self, "get_reward")
        return self.reward

    def close(self):
        fail_if_asked(self, "close")


def evaluate_faulty(tokenizer, **settings):
    """Evaluate an answer of one turn."""
    task = task_of(1, environment_factory=Faulty, answer="environment", **settings)
    return evaluate(Script(tokenizer, [[f"12{EOS}"]]), task, Sampling(max_completion_length=LENGTH))


@pytest.mark.parametrize(
    ("method", "kind"), [("__init__", "error"), ("reset", "exit"), ("get_reward", "error"), ("get_reward", "exit")]
)
def test_an_environment_that_fails_is_named_in_one_line(tokenizer, monkeypatch, method, kind):
    monkeypatch.setattr(Faulty, "fails", (method, kind))
    with pytest.raises(UserError, match="Faulty" if method == "__init__" else f"Faulty.{method}") as error:
        evaluate_faulty(tokenizer)
    assert len(str(error.value).splitlines()) == 1
    assert "test_conversations.py" in str(error.value)


def test_an_environment_that_cannot_be_closed_costs_nothing(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(Faulty, "fails", ("close", "exit"))
    assert evaluate_faulty(tokenizer).scores["accuracy"] == 1
    assert caplog.text.count("Faulty.close") == 2  # of the one that lists the tools, and of the conversation's


def test_a_reward_of_an_environment_that_is_no_number_counts_as_reward_errors_says(tokenizer, monkeypatch):
    monkeypatch.setattr(Faulty, "reward", [1.0])
    with pytest.raises(UserError, match=r"Faulty\.get_reward .* reward_errors"):
        evaluate_faulty(tokenizer)
    assert evaluate_faulty(tokenizer, reward_errors="zero").scores["accuracy"] == 0


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


def learned(folder, tokenizer, turns):
    """Save a policy that has learned one conversation by heart, whatever it is asked: what it says, what it hears."""
    torch.manual_seed(0)
    model = build_model(tokenizer, **TINY)
    examples = batches_of(lambda rng: encode(tokenizer, f"{rng.randrange(100)}", turns), tokenizer.pad_token_id, 4, 0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for batch in islice(examples, 30):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory, tokenizer):
    turns = [(call("3*4"), "12"), ("<think>12</think><answer>12</answer>", "")]
    return learned(tmp_path_factory.mktemp("policy"), tokenizer, turns)


def recipe(policy, **values):
    given = {"model_name_or_path": str(policy), "task": "calculator:make_task", "task_train_size": 4}
    given |= {"task_test_size": 3, "max_completion_length": 48, "use_cpu": True, "max_steps": 1}
    return build_recipe(given | values, Origin("test"))


def test_a_saved_policy_is_evaluated_with_the_tasks_tools(policy):
    found, line = evaluate_checkpoint(recipe(policy, tool_timeout=9, max_tool_calling_iterations=2), str(policy))
    columns = found.columns()
    assert len(columns["messages"]) == 3
    assert [json.loads(messages)[-1]["content"] for messages in columns["messages"]] == columns["completion"]
    assert "12" in [m["content"] for said in columns["messages"] for m in json.loads(said) if m["role"] == "tool"]
    assert (line["config"]["tool_turns"], line["config"]["tool_timeout"]) == (2, 9)


@pytest.mark.slow
def test_a_run_trains_and_evaluates_conversations_and_calls_coroutines_in_one_loop(policy, tmp_path, monkeypatch):
    """A tool may hold what is bound to a loop, such as a connection."""
    tool, loops = calculator, set()

    async def calculator_later(expression: str) -> str:
        loops.add(asyncio.get_running_loop())
        return tool(expression)

    calculator_later.__name__, calculator_later.__doc__ = tool.__name__, tool.__doc__
    made = make_task({"task_train_size": 4, "task_test_size": 3})
    monkeypatch.setattr("calculator.make_task", lambda settings: replace(made, tools=(calculator_later,)))
    values = {"num_rollouts": 4, "num_generations": 2, "per_device_train_batch_size": 2, "eval_prompts": 2}
    run = train(recipe(policy, max_steps=2, ledger_every=1, **values), tmp_path / "run", progress=False)
    assert (run.state, len(run.metrics), len(run.evals)) == ("finished", 2, 2)
    assert sum(row["tools/call_frequency"] for row in run.metrics) > 0
    for name in ("evaluations", "rollouts"):
        table = pq.read_table(next((run.path / name).glob("*.parquet"))).to_pydict()
        assert table["prompt"][0].endswith("<assistant>")
        assert '"12"' in "".join(table["messages"])
    assert len(loops) == 1


def test_a_policy_or_a_prompt_that_cannot_converse_is_refused(tokenizer):
    with pytest.raises(UserError, match="calculator"):
        evaluate_checkpoint(recipe("tiny"), "tiny")
    plain = Dataset.from_dict({"prompt": ["1?"], "answer": ["1"]})
    with pytest.raises(UserError, match="chat"):
        tool_options(tokenizer, Task("t", "1", plain, plain, {"accuracy": 1.0}, tools=(calculator,)))
    with pytest.raises(UserError, match="environments"):
        task_of(1, environment_factory=Guessing, answer="environment").grade([""], [""])


def test_the_calculator_computes_one_operation_and_takes_nothing_else():
    for expression, result in {"12*34": "408", " 12 + -3 ": "9", "9" * 12 + "+1": "1" + "0" * 12}.items():
        assert calculator(expression) == result
    for expression in ("1+2+3", "2**9", "9" * 13 + "*1", "__import__('os')"):
        with pytest.raises(ValueError, match=r"expected a\*b"):
            calculator(expression)
