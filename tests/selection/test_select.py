"""select, get_rule and Selection: what a user hands in and gets back."""

from __future__ import annotations

import sys

import pytest
import torch

from pods_rl.errors import UserError
from pods_rl.selection import Selection, get_rule, select

MINE = '''
import torch

SETTING = 3

def first(rewards_PN, m, *, generator=None):
    """Keep the first m."""
    return torch.arange(m).expand(len(rewards_PN), m)
'''


@pytest.fixture
def my_module(tmp_path, monkeypatch) -> str:
    package = tmp_path / "pods_user_rules"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text(MINE)
    (package / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "pods_user_rules.mine"
    for name in [name for name in sys.modules if name.startswith("pods_user_rules")]:
        del sys.modules[name]


@pytest.mark.parametrize("separator", [":", "."])
def test_a_users_rule_comes_by_its_import_path(my_module: str, separator: str) -> None:
    path = f"{my_module}{separator}first"
    assert get_rule(path).__doc__ == "Keep the first m."
    assert select(torch.zeros(2, 5), 3, rule=path).indices.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_varience", "unknown rule 'max_varience'. Did you mean max_variance?"),
        ("pods_user_rules.mine:second", "AttributeError"),
        ("pods_user_rules.broken:first", "No module named 'a_module_that_is_not_there'"),
        ("pods_user_rules.mine:SETTING", "is a int, not a function"),
    ],
)
def test_a_rule_that_is_not_there(my_module: str, name, message: str) -> None:
    with pytest.raises(UserError) as caught:
        get_rule(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ([[0, 1]], TypeError, r"int64 indices of shape \[2, 2\] on cpu; it returned a list"),
        (torch.zeros(2, 2), TypeError, "it returned a torch.float32 tensor"),
        (torch.tensor([[0, 1]]), ValueError, r"it returned a torch.int64 tensor of shape \[1, 2\]"),
        (torch.tensor([[0, 1], [2, 4]]), ValueError, r"between 0 and 3 .* for group 1 it returned \[2, 4\]"),
        (torch.tensor([[-1, 1], [2, 3]]), ValueError, r"for group 0 it returned \[-1, 1\]"),
        (torch.tensor([[0, 1], [3, 3]]), ValueError, r"2 different .* for group 1 it returned \[3, 3\]"),
    ],
)
def test_a_users_rule_is_checked(returned, error: type[Exception], message: str) -> None:
    def mine(rewards_PN, m, *, generator=None):
        return returned

    with pytest.raises(error, match=message):
        select(torch.zeros(2, 4), 2, rule=mine)


def test_a_selection_marks_and_takes_its_rows() -> None:
    kept = Selection(torch.tensor([[2, 0], [1, 3]]))
    assert kept.mask(4).tolist() == [[True, False, True, False], [False, True, False, True]]
    assert kept.take(torch.arange(8).view(2, 4)).tolist() == [[2, 0], [5, 7]]
    for misfit in (kept.mask, lambda n: kept.take(torch.zeros(2, n))):
        with pytest.raises(ValueError, match="between 0 and n - 1 = 2; got 0 to 3"):
            misfit(3)
    with pytest.raises(ValueError, match=r"2 prompts needs values \[2, N\]; got .* shape \[3, 4\]"):
        kept.take(torch.zeros(3, 4))
    for indices, error in (([[0]], TypeError), (torch.zeros(1, 2), TypeError), (torch.tensor([0, 1]), ValueError)):
        with pytest.raises(error, match="indices must"):
            Selection(indices)
