"""Tools, environments and rollout functions: TRL's at n = m, and n of them with m trained."""

import contextlib
import copy
import functools
import importlib.resources
import json
import os
import signal
import time
from typing import ClassVar

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response

from pods_rl import PODSConfig, PODSTrainer
from pods_rl.engines.trl.step.turns import Turns, tokenize_copies_once
from pods_rl.errors import UserError
from pods_rl.sandbox.limits import parsing_anything, time_limit
from tests import DEADLINE

from .conftest import around, assert_equal_weights, batches_of, kept_of

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
           "</tool_response>", "<think>", "</think>"]  # fmt: skip


def byte_tokenizer():
    """Bytes as tokens, with the chat template of Qwen3 that TRL knows how to parse."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    bytewise = Tokenizer(models.BPE(vocabulary, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>",
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:3]})
    tokenizer.add_tokens(SPECIAL[3:])
    tokenizer.chat_template = (importlib.resources.files("trl") / "chat_templates/qwen3.jinja").read_text()
    return tokenizer


def chat_policy(tokenizer):
    set_seed(7)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="module")
def chat_tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def chat_model(chat_tokenizer):
    return chat_policy(chat_tokenizer)


def call(name, **arguments):
    inner = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{inner}}}}}\n</tool_call><|im_end|>'


class Scripted:
    """Stands in for the policy's `generate`: the text of each rollout's next turn, by its number in the generation."""

    def __init__(self, model, tokenizer, text):
        self.tokenizer, self.text, self.calls = tokenizer, text, []
        model.generate = self

    def __call__(self, input_ids, generation_config=None, **_):
        shown = self.tokenizer.batch_decode(input_ids)
        turns = [self.text(row, text.count("<tool_response>")) for row, text in enumerate(shown)]
        self.calls.append(shown)
        ids = [self.tokenizer(turn)["input_ids"] for turn in turns]
        width = max(map(len, ids))
        pad = self.tokenizer.pad_token_id
        return torch.cat([input_ids, torch.tensor([row + [pad] * (width - len(row)) for row in ids])], dim=1)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


async def add_later(a: int, b: int) -> int:
    return add(a, b)


add_later.__name__, add_later.__doc__ = "add", add.__doc__


class Counter:
    """Counts; `alive` holds the environments that are open."""

    alive: ClassVar[set[int]] = set()
    made = 0

    def __init__(self):
        self.count = 0
        Counter.made += 1
        Counter.alive.add(id(self))

    def reset(self, start: int = 0, **_) -> str:
        self.count = start
        return f" Count from {start}."

    def step(self, by: int) -> int:
        """Count on.

        Args:
            by: How far.

        Returns:
            The count.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class Closing(Counter):
    def close(self) -> None:
        Counter.alive.remove(id(self))


def length(completions, **_):
    return [float(sum(len(str(message["content"])) for message in turns)) for turns in completions]


def chats(**columns):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Go {i}."}] for i in range(8)], **columns})


@pytest.fixture
def build(tmp_path, chat_tokenizer, chat_model):
    """Builds a trainer with a scripted policy; `which` is ours or TRL's."""

    def make(text=None, which=PODSTrainer, data=None, reward=length, steps=2, **given):
        keys = {name: given.pop(name) for name in ("tools", "environment_factory", "rollout_func") if name in given}
        settings = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 4, "num_generations": 2, "max_steps": steps,
            "max_completion_length": 200, "use_cpu": True, "bf16": False, "report_to": "none", "learning_rate": 1e-2,
            "logging_steps": 1, "save_strategy": "no", "seed": 3, **given,
        }  # fmt: skip
        config = PODSConfig if issubclass(which, PODSTrainer) else GRPOConfig
        data = None if data is False else chats() if data is None else data
        trainer = which(
            copy.deepcopy(chat_model), reward, config(**settings), data,
            processing_class=copy.deepcopy(chat_tokenizer), **keys,
        )  # fmt: skip
        if text is not None:
            trainer.script = Scripted(trainer.model, chat_tokenizer, text)
        train = trainer.train
        trainer.train = lambda *given: set_seed(3) or train(*given)  # TRL shuffles a generation by the global generator
        return trainer

    return make


def two_turns(row, turn):
    """Rollouts 0, 3, 6, ... add, 1, 4, ... call with a wrong argument, others answer at once."""
    if turn:
        return f"Done {row % 2}.<|im_end|>"
    return (call("add", a=row, b=4), call("add", a=1, c=4), "No tool" + "!" * row + "<|im_end|>")[row % 3]


def test_n_conversations_a_prompt_and_results_in_their_rows(build):
    trainer = build(two_turns, tools=[add], num_rollouts=6, reward=lambda completions, **_: [
        float(turns[1]["content"]) if len(turns) > 1 and turns[1]["content"].isdigit() else 0.0 for turns in completions
    ], steps=1)  # fmt: skip
    batches = batches_of(trainer)
    trainer.train()
    found = trainer.rollouts
    assert [len(turns) for turns in found.completions] == [3, 3, 1] * 4
    for row, turns in enumerate(found.completions):
        if row % 3 == 0:
            assert turns[1]["content"] == str(row + 4)
    assert kept_of(found).tolist() == [[1, 3], [1, 3]]  # the larger sum, and the first of reward 0
    (batch,) = batches
    tokenizer = trainer.processing_class
    for ids, mask, real in zip(batch["completion_ids"], batch["tool_mask"], batch["completion_mask"], strict=True):
        hidden = tokenizer.decode(ids[(mask == 0) & (real == 1)])
        shown = tokenizer.decode(ids[(mask == 1) & (real == 1)])
        assert "tool_response" not in shown
        assert ("<tool_response>" in hidden) == ("<tool_call>" in shown)
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] == pytest.approx(8 / 12)
    assert log["tools/failure_frequency"] == pytest.approx(4 / 8)


def test_each_turn_of_a_rollout_draws_anew():
    """A row is found again by its tokens; of equal rows the first asked is the first."""
    turns = Turns([(9, 1, 1, 0, number) for number in range(4)])

    def ask(prompt_ids):
        keys = turns.begin(prompt_ids)
        turns.end(prompt_ids, [[7, ids[-1]] for ids in prompt_ids])
        return keys

    assert ask([[1], [2], [2], [3]]) == [(9, 1, 1, 0, number) for number in range(4)]
    asked = ask([[2, 7, 2, 5], [2, 7, 2, 5], [3, 7, 3, 6]])
    assert asked == [(9, 1, 1, 0, 1, 1), (9, 1, 1, 0, 2, 1), (9, 1, 1, 0, 3, 1)]
    assert ask([[3, 7, 3, 6, 7, 6, 8]]) == [(9, 1, 1, 0, 3, 2)]


def asked_to_tokenize(monkeypatch):
    """Filled with the number of prompts of each call of TRL's method that tokenizes."""
    calls = []
    tokenize = GRPOTrainer._tokenize_prompts

    @functools.wraps(tokenize)
    def record(self, prompts):
        calls.append(len(prompts))
        return tokenize(self, prompts)

    monkeypatch.setattr(GRPOTrainer, "_tokenize_prompts", record)
    return calls


def test_the_copies_of_a_prompt_are_tokenized_once(build, monkeypatch):
    """In training, to what TRL makes of each; each row has a list of its own."""
    calls = asked_to_tokenize(monkeypatch)
    returned = []

    class Seen(PODSTrainer):
        def _tokenize_prompts(self, prompts):
            tokenized = super()._tokenize_prompts(prompts)
            expected = GRPOTrainer._tokenize_prompts.__wrapped__(self, prompts)
            returned.append((len(prompts), tokenized, expected))
            return tokenized

    trainer = build(two_turns, tools=[add], which=Seen, num_rollouts=6, steps=1)
    trainer.train()
    ((count, tokenized, expected),) = returned
    assert count == 12
    assert tokenized == expected
    assert len({id(ids) for ids in tokenized[0]}) == 12
    assert calls == [2]
    trainer.evaluate(chats().select(range(2)))
    assert calls[1:] == [count for count, _, _ in returned[1:]] != []


def test_prompts_that_only_compare_equal_are_tokenized_apart():
    prompts = [[{"role": "user", "content": "a", "n": number}] for number in (1, True, 1.0)]
    tokenized = [[str(prompt)] for prompt in prompts]
    found = tokenize_copies_once(lambda asked: ([[str(prompt)] for prompt in asked], None, {}), prompts)
    assert found == (tokenized, None, {})


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no text")


def hang():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(3600)


def leave():
    raise SystemExit(3)


def unreadable():
    raise UnreadableError


def forks():
    """The child returns from the tool, too."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return "parent" if child else "child"


def half_a_pair():
    """Half of a surrogate pair, as a policy's arguments can hold."""
    return "half \ud83d"


@pytest.mark.parametrize(
    ("does", "keys", "said", "fails"),
    [
        (hang, {"tool_timeout": 0.2}, " 0.2 s", True),
        (leave, {}, "SystemExit: 3", True),
        (unreadable, {}, "message", True),
        (forks, {}, "parent", False),
        (half_a_pair, {}, "half ?", False),
    ],
)
def test_a_tool_costs_at_most_its_rollout(build, caplog, tmp_path, does, keys, said, fails):
    """The run goes on, in one process; a failure is named in the log and counted."""

    def act() -> str:
        """Act.

        Returns:
            A text.
        """
        return does()

    def text(row, turn):
        return call("act") if row == 1 and not turn else "Done" + "!" * row + "<|im_end|>"

    trainer, pid = build(text, tools=[act], num_rollouts=4, steps=1, **keys), os.getpid()
    trainer.train()
    with (tmp_path / "trained").open("a") as file:
        file.write("x")
    assert os.getpid() == pid
    assert (tmp_path / "trained").read_text() == "x"
    (result,) = [turns[1]["content"] for turns in trainer.rollouts.completions if len(turns) > 1]
    assert said in result
    assert trainer.state.log_history[0]["tools/failure_frequency"] == fails
    assert any(" act " in record.getMessage() for record in caplog.records) == fails


HOSTILE = {  # what a policy can write as arguments, each as JSON or nearly
    "nested deeply": '{"a": ' + "[" * 3000 + "]" * 3000 + ', "b": 1}',
    "nested, and read by a parser": '{"a": ' + "[" * 200 + "]" * 200 + ', "b": 1}',
    "objects in objects": '{"a": ' + '{"x": ' * 400 + "1" + "}" * 400 + ', "b": 1}',
    "a number of 5,000 digits": '{"a": ' + "9" * 5000 + ', "b": 1}',
    "not a number": '{"a": NaN, "b": -Infinity}',
    "half a pair": '{"a": "\\ud83d", "b": "\\udfff"}',
    "cut off": '{"a": [[[',
}


def hostile_turn(name):
    return f'<tool_call>\n{{"name": "add", "arguments": {HOSTILE[name]}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("name", HOSTILE)
def test_a_turn_with_any_arguments_is_read(chat_tokenizer, name):
    ids = chat_tokenizer(hostile_turn(name))["input_ids"]
    message = parsing_anything(parse_response)(chat_tokenizer, ids)
    assert message["role"] == "assistant"
    json.dumps(copy.deepcopy(message))
    if "nested" in name or "objects" in name:
        assert "tool_calls" not in message
        assert HOSTILE[name] in message["content"]


def test_arguments_that_no_parser_reads_end_their_rollout_and_not_the_run(build):
    trainer = build(
        lambda row, turns: "Done.<|im_end|>" if row % 2 else hostile_turn("nested deeply"),
        tools=[add], num_rollouts=4, max_completion_length=7000, steps=1,
        reward=lambda completions, **_: [0.0] * len(completions),  # so that the long rows need no update
    )  # fmt: skip
    trainer.train()
    assert ["tool_calls" in turns[0] for turns in trainer.rollouts.completions] == [False] * 8


def test_a_time_limit_ends_a_call_and_leaves_an_outer_timer_as_it_was():
    before = bool(signal.getitimer(signal.ITIMER_REAL)[0])  # a limit of the test run itself
    with time_limit(DEADLINE, "outer"):
        with pytest.raises(TimeoutError, match=r"^inner .*0\.05 s"), time_limit(0.05, "inner"):
            time.sleep(60)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= DEADLINE
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == before


def test_an_alarm_just_before_a_time_limit_is_stopped_leaves_no_timer(monkeypatch):
    setitimer = signal.setitimer
    of_test_run = setitimer(signal.ITIMER_REAL, 0.0)
    alarms = [signal.SIGALRM]

    def alarm_first(which, seconds, interval=0.0):
        if seconds == 0 and alarms:
            signal.raise_signal(alarms.pop())
        return setitimer(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", alarm_first)
    with pytest.raises(TimeoutError), time_limit(DEADLINE, "a call"):
        pass
    assert setitimer(signal.ITIMER_REAL, *of_test_run) == (0.0, 0.0)


# -- environments ----------------------------------------------------------------------------------------------------


def count_up(row, turn):
    """Two steps of `row`, then the answer."""
    return "Done." + "<|im_end|>" if turn == 2 else call("step", by=row)


def test_each_rollout_has_its_environment(build, monkeypatch):
    Counter.made, Counter.alive = 0, set()
    tokenized = asked_to_tokenize(monkeypatch)
    trainer = build(
        count_up, data=chats(start=[10 * i for i in range(8)]), reward=None, environment_factory=Closing,
        num_rollouts=6, steps=2,
    )  # fmt: skip
    rows = []

    @around(trainer, "_calculate_rewards")
    def keep(score, *given):
        rows.append(score(*given))
        return rows[-1]

    trainer.train()
    assert tokenized == [12, 12]  # each row with its own tools, and no copy
    assert [tool.__name__ for tool in trainer.tools] == ["step"]
    for scores in rows:
        start = scores.view(2, 6)[:, :1] - torch.tensor([[0.0], [12.0]])
        assert torch.equal(scores.view(2, 6), start + 2.0 * torch.arange(12).view(2, 6))  # twice its own number
    assert Counter.made == 12  # one for each rollout of a generation, reset for the next
    assert Counter.alive == set()
    prompts = [prompt[-1]["content"] for prompt in trainer.rollouts.prompts]
    assert all(
        f"Count from {row['start']}." in text for row, text in zip(trainer.rollouts.inputs, prompts, strict=True)
    )


def test_no_environment_is_left_open_after_ctrl_c(build):
    Counter.alive = set()

    def text(row, turn):
        if turn == 1:
            raise KeyboardInterrupt
        return count_up(row, turn)

    trainer = build(text, reward=None, environment_factory=Closing, num_rollouts=4)
    assert len(Counter.alive) == 1
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert Counter.alive == set()


def test_further_prompts_of_dynamic_sampling_have_environments_of_their_own(build):
    Counter.made, Counter.alive = 0, set()
    trainer = build(
        lambda row, turn: "Done." + "<|im_end|>" if turn else call("step", by=int(row == 0)), steps=1, reward=None,
        data=chats(start=list(range(0, 80, 10))), environment_factory=Closing, num_rollouts=3,
        dynamic_sampling=True, dynamic_sampling_rounds=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["pods/dynamic_sampling/prompts_drawn"] == 1
    assert Counter.made == 6
    assert Counter.alive == set()
    found = trainer.rollouts
    starts = [row["start"] for row in found.inputs]
    assert len(starts) == 9
    assert found.rewards.flatten().tolist() == [start + (i in (0, 6)) for i, start in enumerate(starts)]
    assert all(
        f"Count from {start}." in prompt[-1]["content"] for start, prompt in zip(starts, found.prompts, strict=True)
    )


# -- rollout functions -----------------------------------------------------------------------------------------------


def rollouts(prompts, trainer):
    ids = [trainer.processing_class(f"{i} said{'!' * (i % 5)}")["input_ids"] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt[-1]["content"])["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-1.0] * len(row) for row in ids],
        "env_mask": [[1] * (len(row) - 1) + [0] for row in ids],
        "place": list(range(len(prompts))),
    }


ROUTED = chats(start=list(range(8))).add_column("environment", ["one", "two"] * 4)
AS_IN_TRL = {  # name: the policy's script, arguments of the trainer
    "tools": (two_turns, {"tools": [add]}),
    "async tools": (two_turns, {"tools": [add_later]}),
    "environments": (count_up, {"environment_factory": Counter, "data": chats(start=list(range(8))), "reward": None}),
    "two environments": (
        count_up, {"environment_factory": {"one": Counter, "two": Counter}, "data": ROUTED, "reward": None},
    ),
    "a rollout function": (None, {"rollout_func": rollouts}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "tools",
        "environments",
        "a rollout function",
        pytest.param("async tools", marks=pytest.mark.slow),
        pytest.param("two environments", marks=pytest.mark.slow),
    ],
)
def test_n_equal_to_m_is_trl_to_the_last_bit(build, name):
    """Weights, what the policy sees, environments and logs."""
    text, given = AS_IN_TRL[name]
    theirs, ours = build(text, GRPOTrainer, **given), build(text, exact_trl=True, **given)
    for trainer in (theirs, ours):
        trainer.train()
    assert_equal_weights(ours, theirs)
    if text:
        assert ours.script.calls == theirs.script.calls
    if "environment" in name:
        assert [one.count for one in ours.environments] == [one.count for one in theirs.environments]
    for ours_line, line in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key in set(line) - {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}:
            assert line[key] == ours_line[key], key


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: out["completion_ids"].pop(), "11 completion_ids"),
        (lambda out: out["place"].append(1), "13 place"),
    ],
)
def test_wrong_counts_of_a_rollout_function_are_refused(build, spoil, said):
    def spoiled(prompts, trainer):
        output = rollouts(prompts, trainer)
        spoil(output)
        return output

    with pytest.raises(UserError, match=said):
        build(rollout_func=spoiled, num_rollouts=6).train()


class Riddle(Counter):
    """Owns its data: each rollout begins with a prompt of its own."""

    def reset(self, **_) -> list[dict[str, str]]:
        self.count = Counter.made
        return [{"type": "text", "text": f"Riddle {Counter.made}."}]

    async def get_reward(self) -> float:
        return float(self.count)


def test_environments_that_own_the_data_begin_each_rollout_in_their_own_way(build):
    trainer = build(count_up, data=False, reward=None, environment_factory=Riddle, num_rollouts=4, steps=2)
    trainer.train()
    prompts = [prompt[-1]["content"] for prompt in trainer.rollouts.prompts]
    assert len(prompts) == 8
    assert all("Riddle" in str(text) for text in prompts)
    assert all("Riddle" in text for text in trainer.rollouts.columns()["prompt"])
