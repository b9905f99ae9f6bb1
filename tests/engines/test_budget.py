"""What `max_tokens_per_microbatch: auto` chooses. torch's numbers about the memory of a GPU are replaced."""

from types import SimpleNamespace

import pytest
import torch

from pods_rl.engines.trl.step.budget import Budget

GB = 10**9


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 8 GB free, of which torch keeps 3 GB for reuse besides; a pass takes 2 GB above the 1 GB held."""
    numbers = {"memory_allocated": 1 * GB, "memory_reserved": 4 * GB, "max_memory_allocated": 3 * GB}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def budget_of(setting, device="cuda", gradients=0):
    """The budget of a trainer with gradients of this many bytes, what it logs, and the tokens computed so far."""
    weight = torch.empty(gradients // 4, device="meta")
    trainer = SimpleNamespace(
        args=SimpleNamespace(max_tokens_per_microbatch=setting),
        accelerator=SimpleNamespace(device=torch.device(device)),
        model_wrapped=SimpleNamespace(parameters=lambda: [weight.requires_grad_()]),
    )
    logged = []
    return Budget(trainer, lambda text, level: logged.append(text)), logged


def compute(budget, tokens):
    """Compute a pass of this many tokens."""
    totals = iter((500, 500 + tokens))
    with budget.measuring(lambda: next(totals)):
        pass


def alone(numbers):
    return [numbers]


@pytest.mark.usefixtures("gpu")
def test_auto_chooses_what_is_free_after_a_pass_and_the_gradients():
    """11 GB without the gradients, with a margin of a fifth, at 2 MB a token."""
    budget, logged = budget_of("auto")
    assert (budget.tokens, str(budget)) == (None, "auto (as TRL's micro-batch)")
    compute(budget, 1_000)
    compute(budget, 100)  # a smaller pass, of which the weights would take too large a share
    budget.choose(alone)
    assert (budget.tokens, str(budget)) == (4_400, "auto (4400)")
    (text,) = logged
    assert "auto (4400)" in text
    assert "2,000 MB" in text
    budget.choose(lambda numbers: pytest.fail("chosen once"))
    with_gradients, _ = budget_of("auto", gradients=1 * GB)
    compute(with_gradients, 1_000)
    with_gradients.choose(alone)
    assert with_gradients.tokens == 4_000


@pytest.mark.usefixtures("gpu")
def test_all_processes_choose_the_smallest_budget_once_each_has_computed_a_pass():
    budget, _ = budget_of("auto")
    budget.choose(lambda numbers: [numbers, [3_000]])
    assert budget.tokens is None
    compute(budget, 1_000)
    budget.choose(lambda numbers: [numbers, [0]])
    assert budget.tokens is None
    budget.choose(lambda numbers: [numbers, [3_000]])
    assert budget.tokens == 3_000


def test_auto_is_the_default_on_a_cpu_and_says_so_once():
    budget, logged = budget_of("auto", device="cpu")
    compute(budget, 1_000)
    budget.choose(lambda numbers: pytest.fail("nothing to choose"))
    assert budget.tokens is None
    assert len(logged) == 1
    assert budget_of(None, device="cpu")[1] == []
