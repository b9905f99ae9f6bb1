"""From a recipe to TRL's trainer: reward functions of a task, and what a library rejects as one line."""

import pytest
from datasets import Dataset
from tools.pretrain import EOS, build_tokenizer
from trl.chat_template_utils import parse_response

from pods_rl import rewards
from pods_rl.errors import UserError
from pods_rl.loading.turns import TurnReader
from pods_rl.recipe import Origin, build_recipe
from pods_rl.rewards import REWARDS, VerifierPool
from pods_rl.sandbox import RewardFailure
from pods_rl.sandbox.worker import Reply
from pods_rl.tasks import Task
from pods_rl.training.checks import as_recipe_errors, check_engine
from pods_rl.training.rewards import reward_functions, trl_reward

RIGHT, WRONG = "<answer>3</answer>", "<answer>4</answer>"
HANGS = r"<answer>\sum_{n=1}^{10^9} \frac{1}{n^n}</answer>"
PLAIN = {"model_name_or_path": "tiny", "max_steps": 1, "max_completion_length": 100}
RECIPE = {
    "max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False,
    "task_train_size": 4, "task_test_size": 2, "task_rewards": {"format": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"bf16": True, "fp16": True}, "fp16"),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycle": 2}}, "'num_cycle'"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"power": 2}'}, "'power'"),
    ],
)
def test_a_rejection_is_one_line_with_the_library_s_sentence(keys, words):
    recipe = build_recipe({**RECIPE, **keys}, Origin("r.yaml"))
    with pytest.raises(UserError) as raised:
        check_engine(recipe)
    message = str(raised.value)
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("error", [TypeError("not a text"), ImportError("needs a package"), KeyError("rank")])
def test_an_error_of_a_library_is_one_line_and_a_fault_of_its_code_is_not_hidden(error):
    recipe = build_recipe(RECIPE, Origin("r.yaml"))
    with pytest.raises(UserError, match=r"r\.yaml: "):  # noqa: SIM117
        with as_recipe_errors(recipe):
            raise error
    with pytest.raises(AttributeError), as_recipe_errors(recipe):
        raise AttributeError("'Config' object has no attribute 'save_strategies'")


def test_a_policy_that_does_not_fit_into_memory_is_one_line():
    with pytest.raises(UserError, match=r"r\.yaml: .*memory"):  # noqa: SIM117
        with as_recipe_errors(build_recipe(RECIPE, Origin("r.yaml"))):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 640000000000 bytes.")


def graded(text: str, gold: str) -> float:
    """A user's own reward."""
    return float(text)


def call(function, completions, lengths=None, **more):
    ids = [[0] * length for length in lengths or [1] * len(completions)]
    return function(prompts=completions, completions=completions, completion_ids=ids, answer=["3"] * len(ids), **more)


def functions_of(settings, rewards):
    """The reward functions that a recipe with these settings and rewards gives to TRL."""
    rows = Dataset.from_dict({"prompt": ["1+2="], "answer": ["3"]})
    return reward_functions(build_recipe(PLAIN | settings, Origin("a test")), Task("sums", "1", rows, rows, rewards))


def test_texts_and_chat_messages_are_scored_and_lengths_and_names_reach_the_functions():
    accuracy, overlong = functions_of({}, {"accuracy": 1.0, "overlong": 0.5})
    assert (accuracy.__name__, overlong.__name__) == ("accuracy", "overlong")
    assert call(accuracy, [RIGHT, WRONG]) == [1.0, 0.0]
    assert call(accuracy, [[{"role": "assistant", "content": RIGHT}]]) == [1.0]
    assert call(overlong, ["long text"] * 4, [1, 80, 90, 100]) == [0.0, 0.0, -0.5, -1.0]


R1 = {  # as TRL's for DeepSeek-R1: the opening is the prompt's, and a thought that is cut off is content
    "defaults": {"role": "assistant"},
    "start_anchor": "<think>\n",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"(?=[\s\S]*?</think>)",
            "close_pattern": r"</think>\s*",
            "content": "text",
        },
        "content": {"close": EOS, "content": "text"},
    },
}
QWEN = {  # as TRL's for Qwen3.5: a thought that is cut off is reasoning
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "content": {"close": EOS, "content": "text"},
    },
}


@pytest.mark.parametrize("parsed_by", [None, R1, QWEN])
def test_a_thought_that_the_chat_template_opens_reaches_the_rewards(parsed_by):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0].content }}assistant"
        "{% if thinks %}<think>\n{% elif thinks is defined %}<think>\n\n</think>\n\n{% endif %}"
    )
    if parsed_by:
        tokenizer.response_template = parsed_by
    prompt = [{"role": "user", "content": "1+2="}]

    def scores(said, **options):
        """Accuracy, form and tags of a completion, as TRL passes it to the reward functions."""
        turns = TurnReader(tokenizer, options)
        prefix = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **options)
        ids = tokenizer(said + EOS)["input_ids"]
        plain = {"role": "assistant", "content": said}
        message = parse_response(tokenizer, ids, prefix=prefix) if parsed_by else plain
        rewards = [trl_reward(REWARDS[name], limit=9, turns=turns) for name in ("accuracy", "format", "tag_count")]
        given = {"prompts": [prompt], "completions": [[message]], "completion_ids": [ids], "answer": ["3"]}
        return [reward(**given)[0] for reward in rewards]

    assert scores(f"so</think>{RIGHT}", thinks=True) == [1.0, 1.0, 0.1]
    assert scores(f"</think>\n{RIGHT}", thinks=True) == [1.0, 1.0, 0.1]
    assert scores(f"so {RIGHT}", thinks=True)[:2] == [0.0, 0.0]
    assert scores("so</think>", thinks=True) == [0.0, 0.0, 0.05]
    assert scores("so", thinks=True) == [0.0, 0.0, 0.025]
    assert scores(RIGHT, thinks=False) == [1.0, 0.0, 0.05]


def test_text_prompts_open_thoughts_too_unless_the_tokenizer_drops_the_tags():
    tokenizer = build_tokenizer()
    prompts = ["1+2=<think>", "1+2=", "1+2=<think>\n"]
    assert TurnReader(tokenizer, {}).texts(prompts, ["a"] * 3, [[]] * 3) == ["<think>a", "a", "<think>\na"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    assert TurnReader(tokenizer, {}).texts(prompts, ["a"] * 3, [[]] * 3) == ["a"] * 3


def test_timeouts_of_the_verifier_are_logged_in_each_step(make_trainer, monkeypatch):
    pool = VerifierPool(size=1, limit=0.2)
    for module in ("rewards.answers", "training.rewards"):
        monkeypatch.setattr(f"pods_rl.{module}.default_pool", lambda: pool)
    verify = trl_reward(REWARDS["accuracy"], limit=12)

    def one_hangs(completions, **more):
        return verify(completions=[HANGS, HANGS, *completions[2:]], **more)

    trainer = make_trainer(reward=one_hangs, num_rollouts=8)
    trainer.train()
    pool.close()
    steps = [line for line in trainer.state.log_history if "pods/verifier_timeouts" in line]
    assert [line["pods/verifier_timeouts"] for line in steps] == [1.0, 1.0]  # equal answers once
    assert [line.get("pods/verifier_crashes", 0.0) for line in steps] == [0.0, 0.0]


def test_a_user_s_reward_has_the_recipe_s_time_limit_and_its_failures_reach_the_trainer(monkeypatch):
    name, asked = f"{__name__}:graded", []

    class Pool:
        def ask(self, pairs, limit):
            asked.append(limit)
            return [Reply("timeout"), *[Reply("gave", 2.0)] * (len(pairs) - 1)]

    monkeypatch.setattr(rewards, "user_pool", lambda name: Pool())
    for seconds in (7, None):
        own, _ = functions_of({"reward_seconds": seconds}, {name: 1.0, "format": 1.0})
        first, second = call(own, ["x", "2"])
        assert isinstance(first, RewardFailure)
        assert second == 2.0
    assert asked == [7]  # a built-in reward has no limit
    with pytest.raises(UserError, match="reward_seconds: "):
        functions_of({"reward_seconds": 0}, {"format": 1.0})
