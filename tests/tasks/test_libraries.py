"""`reasoning_gym:NAME` and `verifiers:NAME`, with the real libraries; none needs a network."""

from __future__ import annotations

import gc
import json
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pods_rl.errors import UserError
from pods_rl.evaluation import Sampling
from pods_rl.evaluation.conversation import converse
from pods_rl.policies.build import EOS
from pods_rl.policies.loading import tool_options
from pods_rl.recipe import Origin, build_recipe
from pods_rl.rewards import library_reward, score, tasksets
from pods_rl.rewards.gym import numbered
from pods_rl.rollouts.tools import ToolLimits, close_environment
from pods_rl.runs import Run
from pods_rl.sandbox.pool import WorkerPool
from pods_rl.tasks import Task, load_task
from pods_rl.tasks.task import check_split, shared_prompts
from pods_rl.training import trainer as build

from ..cli import pods
from ..test_conversations import Script, build_policy_tokenizer, call, learned

SIZES = {"task_train_size": 6, "task_test_size": 3}
gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")


def make(task: str, options: dict | None = None, **settings):
    return load_task({"task": task, "task_options": options, **SIZES, **settings})


@pytest.fixture(autouse=True, scope="module")
def one_process():
    """One grading process a task: each imports its library for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pods_rl.sandbox.pool.MAX_WORKERS", 1)
        yield


def answers(*given: str) -> list[str]:
    return [f"<answer>{answer}</answer>" for answer in given]


# -- reasoning-gym ----------------------------------------------------------------------------------------------------


LEGS = {"max_animals": 4}


@pytest.fixture(scope="module")
def legs():
    """One task for all tests: its grading process starts once."""
    return make("reasoning_gym:leg_counting", LEGS)


@pytest.fixture
def forked(monkeypatch):
    """Grading processes are copies of this one, which has loaded the library already."""

    start = WorkerPool.launch

    def launch(pool, questions, replies):
        if isinstance(pool._work, tuple | list) and isinstance(pool._work[0], str):
            module, _, name = pool._work[0].partition(":")
            pool._work = getattr(sys.modules[module], name)(*pool._work[1:])
        return start(pool, questions, replies)

    monkeypatch.setattr(WorkerPool, "launch", launch)


@gym
def test_problems_are_graded_by_the_scorer_of_their_data_set(legs):
    assert (legs.name, len(legs.train), len(legs.test)) == ("reasoning_gym/leg_counting", 6, 3)
    assert legs.rewards == {"reasoning_gym": 1.0, "format": 0.1, "tag_count": 1.0}
    assert metadata.version("reasoning-gym") in legs.version
    for split in ("train", "test"):
        assert check_split(legs, split).refused == ()
    gold = legs.train[0]["answer"]
    right = gold.split()[0]
    # the library's partial credit: the share of the text that is the gold answer
    marks = legs.scores("reasoning_gym", [*answers(right, f"{right} legs", "x"), right], [gold] * 4)
    assert marks == [1.0, len(right) / len(f"{right} legs"), 0.0, 0.0]


@gym
def test_splits_are_the_same_for_a_seed_and_disjoint_over_seeds(legs, monkeypatch):
    monkeypatch.setattr("pods_rl.tasks.gym.score", lambda reward, texts, *_: [1.0] * len(texts))
    other = make("reasoning_gym:leg_counting", LEGS, task_seed=7)
    assert make("reasoning_gym:leg_counting", LEGS).train["prompt"][:] == legs.train["prompt"][:]
    assert other.train["prompt"][:] != legs.train["prompt"][:]
    trained = {str(prompt) for task in (legs, other) for prompt in task.train["prompt"]}
    assert not trained & {str(prompt) for task in (legs, other) for prompt in task.test["prompt"]}
    assert shared_prompts(legs) == 0


@gym
def test_no_scorer_runs_an_answer_as_code(tmp_path, forked):
    """The scorer of spiral_matrix would `eval` an answer that is not the gold text."""
    task = make("reasoning_gym:spiral_matrix", {"max_n": 3})
    gold = task.test[0]["answer"]
    numbers = gold.partition(" (")[0]
    mark = tmp_path / "ran"
    attempts = answers(f"[open({str(mark)!r}, 'w')]", f"[{numbers.replace(' ', ', ')}]", numbers)
    assert task.scores("reasoning_gym", attempts, [gold] * 3) == [0.0, 0.0, 1.0]
    assert not mark.exists()


@gym
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("leg_count", None, "no data set 'leg_count'; similar names: leg_counting"),
        ("leg_counting", {"max_animal": 3}, "task_options: reasoning-gym's leg_counting rejects {'max_animal': 3}"),
        ("countdown", None, "its scorer does not accept its own answer .* code, which is blocked: choose another"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(name, options, message, forked):
    with pytest.raises(UserError, match=message):
        make(f"reasoning_gym:{name}", options)


RUN = (
    "--recipe tiny-pods --num_rollouts 4 --num_generations 2 --per_device_train_batch_size 2 --max_steps 2 "
    "--eval_prompts 2 --ledger_every 1 --threads 1 --system_prompt= "
    f"--task_train_size {SIZES['task_train_size']} --task_test_size {SIZES['task_test_size']}"
).split()


@pytest.fixture
def read_back(tmp_path, monkeypatch):
    """A function that reads the run `run`: its records, ledger, last evaluation and report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pods_rl.report.figures.to_bytes", lambda figure, kind: b"")  # most of a report's time

    def read():
        run = Run.open("run")
        assert run.state == "finished"
        pods("report", "run")
        ledger = [row for path in run.rollout_files() for row in pq.read_table(path).to_pylist()]
        page = Path("run/report/report.html").read_text(encoding="utf-8")
        return run, ledger, pq.read_table(run.evaluation_files()[-1]).to_pylist(), page

    return read


@gym
def test_a_run_trains_on_a_data_set_and_its_ledger_names_the_problem(read_back):
    words = ["--task", "reasoning_gym:leg_counting", "--task_options", json.dumps(LEGS), "--max_completion_length", "4"]
    pods("train", "--output", "run", *RUN, *words, "--task_rewards", "{reasoning_gym: 2.0, format: 0.1}")
    run, ledger, evaluated, page = read_back()
    assert "rewards/reasoning_gym/mean" in run.metrics[-1]
    assert (len(ledger), len(evaluated)) == (8, 2)
    assert all(" (problem " in row["answer"] for row in ledger)
    assert ledger[0]["answer"] in page


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_scorer_of_a_library_is_killed_when_it_hangs(tmp_path, monkeypatch):
    (tmp_path / "slow_scorer.py").write_text(
        "import time\n"
        "from pods_rl.sandbox.pool import Work\n"
        "def work(most):\n"
        "    def mark(pair):\n"
        "        time.sleep(600 if pair[0] == 'hang' else 0)\n"
        "        return min(float(pair[1]), float(most))\n"
        "    return Work(mark)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = library_reward("slow", ("slow_scorer:work", "0.5"), given=lambda gold: gold.split()[0])
    marks = score(reward, ["hang", "", "", ""], [numbered(gold, 1) for gold in ("1", "1", "0.25", "x")], 2.0)
    assert (marks[0].late, marks[1:3], marks[3].late) == (True, [0.5, 0.25], False)
    assert reward("", "0.25") == 0.25
    with pytest.raises(RuntimeError, match="reward 'slow' raised ValueError"):
        reward("", "x")


# -- verifiers --------------------------------------------------------------------------------------------------------

SUMS = """
import asyncio
from collections import Counter

import anyio
import verifiers.v1 as vf

__all__ = ["Sums"]

class Config(vf.TasksetConfig):
    largest: int = 5

class Count(vf.State):
    calls: int = 0

class Data(vf.TaskData):
    answer: str

class Tools(vf.Toolset[vf.ToolsetConfig, Count]):
    made, open = Counter(), Counter()  # of each class

    async def setup(self):
        # as a client of the toolset may be: closed in the task and the loop that opened it, or an error
        self.group = await self._exit_stack.enter_async_context(anyio.create_task_group())
        self.loop = asyncio.get_running_loop()
        self._exit_stack.callback(self.leave)
        self.made[type(self).__name__] += 1
        self.open[type(self).__name__] += 1

    def leave(self):
        self.open[type(self).__name__] -= 1

    async def setup_task(self, task):
        self.gold = task.data.answer

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        '''Add two numbers.'''
        self.state.calls += 1
        return a + b

    @vf.tool
    async def wait(self) -> str:
        '''Wait for ever.'''
        self.open["call"] += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.open["call"] -= 1

    @vf.tool
    def peek(self, who) -> str:
        assert asyncio.get_running_loop() is self.loop
        self.state.calls += 1
        return f"{who}: {self.gold}"

class Sum(vf.Task[Data, Count, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        assert trace.last_reply != "raise"
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.reward(weight=0.5)
    async def style(self, trace) -> float:
        assert [message.role for message in trace.messages[:2]] == ["system", "user"]
        return float(len(trace.last_reply) < 9)

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        pairs = [(a, b) for a in range(self.config.largest) for b in range(self.config.largest)]
        rows = [Data(prompt=f"{a}+{b}?", answer=str(a + b), system_prompt="Add.") for a, b in pairs]
        return [Sum(row, self.config.task) for row in rows]
"""
TOOLS = """
Sum.toolsets = classmethod(lambda cls, config: [Tools(vf.ToolsetConfig())])

class Counted(Sum):
    @vf.reward(weight=0.5)
    async def style(self, trace) -> float:
        told = [message.content for message in trace.tool_messages]
        return float(trace.state.calls == 1 and told == [f"me: {self.data.answer}"])

class Shared(Tools): pass

class Sums(vf.Taskset[Counted, Config]):
    toolsets = classmethod(lambda cls, config: [Shared(vf.SharedToolsetConfig())])

    def load(self):
        return [Counted(Data(prompt=f"{a}+1?", answer=str(a + 1)), self.config.task) for a in range(40)]
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the taskset `sums-v1`, with further lines, as a module that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda more="": (tmp_path / "sums_v1.py").write_text(SUMS + more)
    sys.modules.pop("sums_v1", None)


def graded(task, texts, golds):
    """Score with the work of a grading process, in this one."""
    (grader,) = task.graders
    work = tasksets.scoring(grader.maker[1])
    return [work.answer((text, grader.given(gold))) for text, gold in zip(texts, golds, strict=True)]


def counts():
    """How many toolsets of each class were set up, and how many of them are not torn down."""
    tools = sys.modules["sums_v1"].Tools
    return dict(tools.made), dict(+tools.open)


@verifiers
def test_a_run_trains_on_a_taskset_which_is_graded_by_its_rewards(write, read_back):
    write()
    words = ["--task", "verifiers:sums-v1", "--task_options", "{largest: 6}", "--max_completion_length", "5"]
    pods("train", "--output", "run", *RUN, *words)
    run, ledger, evaluated, page = read_back()
    assert (len(ledger), len(evaluated)) == (8, 2)
    assert {row["prompt"].partition("\n")[0] for row in [*ledger, *evaluated]} == {"Add."}
    for row in ledger:  # some are short, none is right
        assert row["reward"] == row["reward/verifiers"] == 0.5 * (len(row["completion"]) < 9)
    assert len({row["reward"] for row in ledger}) == 2
    assert run.metrics[0]["rewards/verifiers/mean"] == sum(row["reward"] for row in ledger[:4]) / 4
    assert json.dumps(ledger[0]["completion"])[1:-1].replace("<", "\\u003c").replace(">", "\\u003e") in page
    # what this run graded with, in its process
    task = make("verifiers:sums-v1", {"largest": 6})
    assert (task.name, len(task.train), len(task.test), task.rewards) == ("verifiers/sums-v1", 6, 3, {"verifiers": 1.0})
    assert metadata.version("verifiers") in task.version
    assert task.train[0]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "0+0?"}]
    assert not task.converses
    assert shared_prompts(task) == 0
    gold = task.test[0]["answer"]
    right = gold.split()[0]
    assert task.scores("verifiers", [right, f"the sum is {right}", "x", f"{right} no"], [gold] * 4) == [
        1.5,
        1,
        0.5,
        0.5,
    ]
    with pytest.raises(UserError, match=r"the reward 'verifiers' raised TaskError: .*AssertionError"):
        task.grade(["raise"], [gold])


@verifiers
def test_a_run_trains_on_a_taskset_with_tools(write, read_back, tmp_path, forked):
    """The policy knows by heart to peek, and then to say 5."""
    write(TOOLS)
    turns = [(call("me", "tools_peek", "who"), "me: 5"), ("5", "")]
    policy = learned(tmp_path / "policy", build_policy_tokenizer(), turns)
    words = ["--model_name_or_path", policy, "--task", "verifiers:sums-v1", "--max_completion_length", "48"]
    pods("train", "--output", "run", *RUN, *words, "--save_steps", "1")
    pods("train", "--output", "run", "--resume", "--max_steps", "3")
    run, ledger, evaluated, page = read_back()
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert (len(ledger), len(evaluated)) == (12, 2)
    told = 0
    for row in [*ledger, *evaluated]:
        gold = row["answer"].split()[0]
        messages = json.loads(row["messages"] or "null") or [{"role": "assistant", "content": row["completion"]}]
        last = [message["content"] for message in messages if message["role"] == "assistant"][-1]
        heard = [message["content"] for message in messages if message["role"] == "tool"]
        told += heard == [f"me: {gold}"]
        mark = float(last.split()[-1:] == [gold]) + 0.5 * (heard == [f"me: {gold}"])
        assert row.get("reward", mark) == mark
        assert row.get("answer_right", mark >= 1) == (mark >= 1)
    assert told > 7
    assert "tools_peek" in page
    gc.collect()
    assert counts()[1] == {}
    made = counts()[0]
    assert made["Tools"] >= 12 + 2 * 3  # rollouts, evaluations
    assert made["Shared"] == 2  # of the run, and of the run that went on


@verifiers
def test_tools_share_the_state_of_one_rollout_and_the_rewards_read_it(write):
    write(TOOLS)
    task = make("verifiers:sums-v1")
    assert task.converses
    row = task.train[0]
    gold = row["answer"].split()[0]
    first, second = task.environment_factory(), task.environment_factory()
    for environment in (first, second):
        environment.reset(**row)
    tools = {tool.__name__: tool for tool in task.tools_of(first)}
    assert tools["tools_peek"](who="me") == f"me: {gold}"
    assert (first.state.calls, second.state.calls) == (1, 0)
    assert tools["tools_add"](a=1, b=2) == "3"
    assert first.state.calls == 2
    first.reset(**row)
    assert first.state.calls == 0


@verifiers
def test_toolsets_end_with_their_rollout_and_shared_ones_with_the_task(write):
    write(TOOLS)
    task = make("verifiers:sums-v1")
    row = task.train[0]
    first, second, unused = (task.environment_factory() for _ in range(3))
    for environment in (first, second, first):  # the second reset ends what the first began
        environment.reset(**row)
    assert counts() == ({"Shared": 1, "Tools": 3}, {"Shared": 1, "Tools": 2})
    for environment in (first, first, unused):
        environment.close()
    assert counts()[1] == {"Shared": 1, "Tools": 1}
    assert second.shared_add(a=1, b=2) == "3"
    limited = ToolLimits(0.05).of_rollout({"wait": second.tools_wait, "peek": second.tools_peek})
    with pytest.raises(TimeoutError, match="tool wait took longer"):
        limited["wait"]()
    assert limited["peek"](who="me") == f"me: {row['answer'].split()[0]}"
    assert counts()[1] == {"Shared": 1, "Tools": 1}  # the call that took longer has ended
    close_environment(second)
    del task, environment, first, second, unused, limited
    gc.collect()
    assert counts() == ({"Shared": 1, "Tools": 3}, {})


@verifiers
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_toolsets_end_where_another_one_cannot_begin(write, error):
    broken = f"class Broken(Tools):\n    async def setup_task(self, task): raise {error.__name__}\n"
    both = "Sum.toolsets = classmethod(lambda cls, config: [kind(vf.ToolsetConfig()) for kind in (Tools, Broken)])\n"
    write(TOOLS + broken + both)
    task = make("verifiers:sums-v1")
    environment = task.environment_factory()
    with pytest.raises(error):
        environment.reset(**task.train[0])
    assert counts() == ({"Shared": 1, "Tools": 1, "Broken": 1}, {"Shared": 1})
    environment.close()


@verifiers
def test_conversations_are_graded_whole_in_training_and_in_evaluation(write, monkeypatch):
    write(TOOLS)
    task = make("verifiers:sums-v1")
    monkeypatch.setattr(Task, "scores", lambda self, name, texts, golds: graded(self, texts, golds))
    monkeypatch.setattr(build, "score_texts", lambda reward, texts, golds, seconds: graded(task, texts, golds))
    rows = [task.test[0]] * 3
    gold = rows[0]["answer"].split()[0]
    asking, saying = call("me", "tools_peek", "who") + EOS, f"{gold}{EOS}"
    script = Script(build_policy_tokenizer(), [[asking, saying], [saying], [asking, asking, f"9{saying}"]])
    how = Sampling(temperature=1.0, max_completion_length=400, batch_size=3, seed=0)
    options = tool_options(script.tokenizer, task)
    talks = converse(script, task, rows, range(3), how, options, None, ToolLimits(), lambda *_: None)
    assert [talk.reward for talk in talks] == [1.5, 1.0, 0.0]
    assert counts() == ({"Shared": 1, "Tools": 3}, {"Shared": 1})
    assert [grade.answer for grade in task.grade([""] * 3, [""] * 3, [talk.reward for talk in talks])] == [1, 1, 0]
    with pytest.raises(UserError, match="is graded by its environments"):
        task.grade(["1"], [rows[0]["answer"]])
    environments = [task.environment_factory() for _ in rows]
    for environment, calls in zip(environments, (1, 0, 2), strict=True):
        environment.reset(**rows[0])
        for _ in range(calls):
            environment.tools_peek(who="me")
    score_rows = build.trl_reward(task.graders[0], limit=400)
    messages, golds = [talk.messages for talk in talks], [row["answer"] for row in rows]
    marks = score_rows(completions=messages, answer=golds, completion_ids=[[]] * 3, environments=environments)
    assert marks == [1.5, 1.0, 0.0]
    assert check_split(task, "test").unknown == 3


@verifiers
def test_tools_are_described_as_the_chat_template_needs(write):
    from transformers.utils import get_json_schema

    write(TOOLS + "Tools.TOOL_PREFIX, Shared.TOOL_PREFIX = None, ''\n")
    environment = make("verifiers:sums-v1").environment_factory()
    add, peek = (get_json_schema(getattr(environment, name))["function"] for name in ("add", "peek"))
    assert (add["name"], add["description"]) == ("add", "Add two numbers.")
    assert add["parameters"]["properties"]["a"] == {"type": "integer", "description": "a"}
    assert peek["parameters"]["required"] == ["who"]


@verifiers
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("class Own(vf.SingleAgentEnv): pass\n__all__ += ['Own']", "has an environment of its own, Own"),
        ("class Own(vf.Harness): pass\n__all__ += ['Own']", "has a harness of its own"),
        ("async def setup(self, trace, runtime): pass\nSum.setup = setup", "setup of its tasks needs the box"),
        ("del Sum.right, Sum.style", "its tasks have no reward"),
        ("Data.model_fields['prompt'].default = None\nSums.load = lambda self: [Sum(Data(answer='1'))]", "no prompt"),
        ("Sums.load = lambda self: [Sum(Data(answer='1', prompt='?', image='ubuntu'))]", "needs a container or files"),
        (
            "part = vf.ImageUrlContentPart(image_url={'url': 'data:,'})\n"
            "asked = [vf.UserMessage(content=[part])]\n"
            "Sums.load = lambda self: [Sum(Data(answer='1', prompt=asked))]",
            "task 0 has an image",
        ),
        (
            f"{TOOLS}\n@vf.stop\ndef enough(self, trace: vf.Trace): return True\nSum.enough = enough",
            "stop the conversation",
        ),
        (f"{TOOLS}\nTools.TOOL_PREFIX = None\n", "tool 'add' is taken"),
        (
            f"{TOOLS}\nTools.TOOL_PREFIX, Shared.TOOL_PREFIX = None, ''\nTools.add.tool_name = 'get_reward'",
            "tool 'get_reward' is taken",
        ),
        ("Sums.load = lambda self: []", "has no train prompt"),
        ("raise OSError('no disk')", "could not be loaded with {}: OSError: no disk"),
    ],
)
def test_a_taskset_that_needs_more_is_refused_in_one_sentence(write, more, message):
    write(more)
    with pytest.raises(UserError, match=f"^verifiers:sums-v1:? .*{message}"):
        make("verifiers:sums-v1", {})


@verifiers
def test_unknown_tasksets_and_options_are_named(write):
    write()
    with pytest.raises(UserError, match=r"no taskset 'sum-v1' for verifiers.* similar names: sums_v1"):
        make("verifiers:sum-v1")
    with pytest.raises(UserError, match=r"rejects larget: Extra inputs .* Its options are .*largest"):
        make("verifiers:sums-v1", {"larget": 3})


# -- recipes ----------------------------------------------------------------------------------------------------------


def recipe(**values):
    return build_recipe({"max_steps": 1, "model_name_or_path": "tiny", **values}, Origin("test"))


@pytest.mark.parametrize("task", ["reasoning_gym:chain_sum", "verifiers:sums-v1"])
def test_a_recipe_names_what_to_install(task, monkeypatch):
    library, _, _ = task.partition(":")
    monkeypatch.setattr("pods_rl.recipe.task_checks.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf"needs {library.replace('_', '-')}, which is not installed: pip install 'pods"
    ):
        recipe(task=task)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "verifiers:"}, "verifiers: needs a name after the colon, as in verifiers:my-taskset"),
        ({"task": "verifiers:a", "dataset_name": "a/b"}, "generates its prompts, so it does not read dataset_name"),
        ({"task": "verifiers:a", "data_dir": "."}, "generates its prompts, so it does not read data_dir"),
        ({"task": "gsm8k", "task_rewards": {"verifiers": 1.0}}, "unknown reward verifiers"),
    ],
)
def test_what_a_librarys_task_does_not_read_is_refused(values, message, monkeypatch):
    monkeypatch.setattr("pods_rl.recipe.task_checks.find_spec", lambda name: object())
    with pytest.raises(UserError, match=message):
        recipe(**values)


def test_a_librarys_reward_can_be_weighed_in_its_recipe(monkeypatch):
    monkeypatch.setattr("pods_rl.recipe.task_checks.find_spec", lambda name: object())
    weights = {"reasoning_gym": 2.0, "format": 0.5}
    assert recipe(task="reasoning_gym:chain_sum", task_rewards=weights).task_settings()["task_rewards"] == weights


def test_both_forms_are_listed():
    listed = pods("tasks").output
    assert "reasoning_gym:NAME" in listed
    assert "verifiers:NAME" in listed
