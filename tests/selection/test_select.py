"""select, get_rule and Selection: what a user hands in and gets back."""

import sys

import pytest
import torch

from pods_rl.errors import UserError
from pods_rl.selection import RULES, Selection, advantages, get_rule, select
from pods_rl.selection.rules import check_rule


def first(rewards_PN, m, *, generator=None):
    """Keep the first m."""
    return torch.arange(m).expand(len(rewards_PN), m)


@pytest.mark.parametrize("separator", [":", "."])
def test_a_users_rule_comes_by_its_import_path(separator: str) -> None:
    path = f"{__name__}{separator}first"
    assert get_rule(path) is first
    assert select(torch.zeros(2, 5), 3, rule=path).indices.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (torch.zeros(2, 2), TypeError, "float32"),
        (torch.tensor([[0, 1]]), ValueError, r"int64.*\[1, 2\]"),
        (torch.tensor([[0, 1], [2, 4]]), ValueError, r"group 1 .*\[2, 4\]"),
        (torch.tensor([[0, 1], [3, 3]]), ValueError, r"group 1 .*\[3, 3\]"),
    ],
)
def test_a_users_rule_is_checked(returned, error: type[Exception], message: str) -> None:
    def mine(rewards_PN, m, *, generator=None):
        return returned

    with pytest.raises(error, match=message):
        select(torch.zeros(2, 4), 2, rule=mine)


def clamps_a_view(rewards_PN, m, *, generator=None):
    rewards_PN[:, ::2].clamp_(max=0)
    return torch.arange(m).expand(len(rewards_PN), m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_rule_may_change_what_it_is_given(dtype: torch.dtype) -> None:
    rewards_PN = torch.tensor([[1, 0, 2, 3], [5, 4, 1, 0]]).to(dtype)
    before_PN = rewards_PN.clone()
    kept = select(rewards_PN, 2, rule=clamps_a_view)
    assert torch.equal(rewards_PN, before_PN)
    assert (advantages(rewards_PN, kept) != 0).all()


def raises(rewards_PN, m, *, generator=None):
    return {}["a key\nof mine"]


def leaves(rewards_PN, m, *, generator=None):
    sys.exit(0)


@pytest.mark.parametrize(("rule", "said"), [(raises, "KeyError: 'a key"), (leaves, "SystemExit: 0")])
def test_a_rule_that_raises_is_named_in_one_line(rule, said: str) -> None:
    with pytest.raises(UserError) as caught:
        select(torch.zeros(2, 4), 2, rule=rule)
    message = str(caught.value)
    assert f"'{rule.__name__}'" in message
    assert said in message
    assert "(test_select.py, " in message
    assert "\n" not in message


class Callable:
    def __call__(self, rewards_PN, m, *, generator=None):
        return torch.arange(m).expand(len(rewards_PN), m)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (None, "^rule .*None.*max_variance"),
        (Callable, "test_select:Callable' .*class"),
        ("pods_rl.selection:RULES", "dict"),
        ("pods_rl.selektion:max_reward", "ModuleNotFoundError"),
        ("pods_rl.selection.rules:max_rewards", "AttributeError"),
        ("", "rule ''"),
    ],
)
def test_a_value_that_is_not_a_rule_is_refused(rule, message: str) -> None:
    for call in (lambda: select(torch.zeros(1, 4), 2, rule=rule), lambda: check_rule(rule)):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert select(torch.zeros(1, 4), 2, rule=Callable()).indices.tolist() == [[0, 1]]


@pytest.mark.parametrize("rule", ["random", "max_variance", Callable()])
def test_a_seed_is_not_a_generator(rule) -> None:
    with pytest.raises(TypeError, match=r"^generator .*manual_seed"):
        select(torch.zeros(1, 4), 2, rule=rule, generator=3)


def test_a_selection_marks_and_takes_its_rows() -> None:
    kept = Selection(torch.tensor([[2, 0], [1, 3]]))
    assert kept.mask(4).tolist() == [[True, False, True, False], [False, True, False, True]]
    assert kept.take(torch.arange(8).view(2, 4)).tolist() == [[2, 0], [5, 7]]
    for misfit in (kept.mask, lambda n: kept.take(torch.zeros(2, n))):
        with pytest.raises(ValueError, match="n - 1 = 2"):
            misfit(3)
    with pytest.raises(ValueError, match=r"\[2, N\].*\[3, 4\]"):
        kept.take(torch.zeros(3, 4))
    for rows in ([[1, 1]], [[0, 2], [3, 3]], [[0, -1]]):
        with pytest.raises(ValueError, match=f"group {len(rows) - 1}"):
            Selection(torch.tensor(rows))
    with pytest.raises(TypeError, match=r"^n, "):
        kept.mask(4.0)
    with pytest.raises(TypeError, match=r"^values .*torch.tensor\(values\)"):
        kept.take([[1.0, 2.0]])
    for indices, error in (([[0]], TypeError), (torch.zeros(1, 2), TypeError), (torch.tensor([0, 1]), ValueError)):
        with pytest.raises(error, match="indices"):
            Selection(indices)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda rewards_PN, indices_PM: select(rewards_PN.to_sparse(), 2), "rewards"),
        (lambda rewards_PN, indices_PM: select(rewards_PN.to("meta"), 2, Callable()), "rewards"),
        (lambda rewards_PN, indices_PM: advantages(rewards_PN.to_sparse(), Selection(indices_PM)), "rewards"),
        (lambda rewards_PN, indices_PM: Selection(indices_PM).take(rewards_PN.to("meta")), "values"),
        (lambda rewards_PN, indices_PM: Selection(indices_PM.to_sparse()), "Selection.indices"),
    ],
)
def test_tensors_without_dense_values_are_refused_by_name(call, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must .*; got a "):
        call(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("m", "error"), [(0, ValueError), (5, ValueError), (True, TypeError), (2.0, TypeError)])
def test_m_is_an_int_from_1_to_n(m, error: type[Exception]) -> None:
    for rule in (*RULES, Callable()):
        with pytest.raises(error, match=r"\bm\b"):
            select(torch.zeros(1, 4), m, rule)
