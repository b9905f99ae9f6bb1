"""Prompts fitted to a policy: plain without a chat template, none too long to train on, and versions that say so."""

import pytest
from datasets import Dataset
from jinja2 import TemplateError

from pods_rl.errors import UserError
from pods_rl.tasks import Task, fit_prompts, load_task, prompts

TWO = {"task_train_size": 4, "task_test_size": 2}


def task_of(train, test=("a",)):
    splits = (Dataset.from_dict({"prompt": list(rows), "answer": ["1"] * len(rows)}) for rows in (train, test))
    return Task("words", "1-chat", *splits, {"accuracy": 1.0})


def test_a_policy_without_a_template_reads_what_plain_prompts_are():
    words = {"task": "words", "system_prompt": "Add.", **TWO}
    chat = load_task({**words, "prompt_style": "chat"})
    plain = load_task(words)
    fitted, found = fit_prompts(chat, chat=False)
    assert fitted.train.to_list() == plain.train.to_list()
    assert fitted.test.to_list() == plain.test.to_list()
    assert (fitted.version, found) == (plain.version, None)
    assert fit_prompts(chat, chat=True)[0] is chat
    assert fit_prompts(plain, chat=False)[0] is plain


def test_what_cannot_be_trained_on_is_refused():
    with pytest.raises(UserError, match=r"max_prompt_length = 2: .*3 tokens"):
        fit_prompts(task_of(["aaa", "aaaa"]), chat=True, limit=2)


def test_a_version_holds_grader_number_prompt_and_style(monkeypatch):
    form = prompts.PromptForm()
    versions = {form.version(1), form.version(2), prompts.PromptForm("plain").version(1)}
    versions.add(prompts.PromptForm(system="Add.").version(1))
    monkeypatch.setattr(prompts, "GRADER_VERSION", "99")
    versions.add(form.version(1))
    assert len(versions) == 5


def words(settings):
    """A task of one's own, named by its path."""
    return task_of(["a"] * (settings["task_train_size"] or 1))


def test_a_task_of_ones_own_is_named_by_its_path():
    task = load_task({"task": f"{__name__}:words", "task_train_size": 3, "task_rewards": {"format": 1}})
    assert (task.name, len(task.train), dict(task.rewards)) == ("words", 3, {"format": 1.0})
    assert load_task({"task": f"{__name__}.words", "task_train_size": None}).name == "words"


def failing_task(settings):
    raise KeyError("a setting of mine")


def exiting_task(settings):
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("name", "reason"), [("failing_task", "KeyError: 'a setting of mine'"), ("exiting_task", "SystemExit: 0")]
)
def test_a_task_function_that_raises_is_a_line_with_the_place_in_its_file(name, reason):
    with pytest.raises(UserError, match=rf"{name}' .*: {reason} \(test_prompts.py, line \d+\)"):
        load_task({"task": f"{__name__}:{name}"})


def test_a_prompt_that_the_template_rejects_is_named():
    def no_system(prompt):
        if prompt[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return ""

    system, user = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
    with pytest.raises(UserError, match=r"System .*system_prompt: ''"):
        fit_prompts(task_of([[user]], [[system, user]]), chat=True, render=no_system)
