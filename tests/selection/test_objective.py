"""The reference objective against worked values, a plain loop, and numerical gradients."""

import math

import pytest
import torch

from pods_rl.selection import pods_objective

pytestmark = pytest.mark.numeric


def example(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    lengths_PM = torch.tensor([[5, 1, 3], [2, 4, 0]])
    logps_PMT = draw(2, 3, 5) - 2
    return {
        "logps_PMT": logps_PMT,
        "old_logps_PMT": logps_PMT + 0.3 * draw(2, 3, 5),
        "advantages_PM": draw(2, 3),
        "mask_PMT": torch.arange(5) < lengths_PM.unsqueeze(-1),
        "ref_logps": logps_PMT + 0.3 * draw(2, 3, 5),
    }


def by_hand(logps_PMT, old_logps_PMT, advantages_PM, mask_PMT, ref_logps, low, high, beta) -> float:
    rows = []
    for p in range(logps_PMT.shape[0]):
        for m in range(logps_PMT.shape[1]):
            terms = []
            for t in mask_PMT[p, m].nonzero().flatten().tolist():
                logp, a = float(logps_PMT[p, m, t]), float(advantages_PM[p, m])
                ratio = math.exp(logp - float(old_logps_PMT[p, m, t]))
                gap = float(ref_logps[p, m, t]) - logp
                gain = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
                terms.append(gain - beta * (math.exp(gap) - gap - 1))
            rows.append(sum(terms) / len(terms) if terms else 0.0)
    return -sum(rows) / len(rows)


@pytest.mark.parametrize(("low", "high", "beta"), [(0.2, None, 0.0), (0.2, 0.28, 0.0), (0.1, 0.3, 0.04)])
def test_agrees_with_a_plain_loop(low: float, high: float | None, beta: float) -> None:
    inputs = example()
    loss = pods_objective(**inputs, epsilon_low=low, epsilon_high=high, beta=beta)
    expected = by_hand(**inputs, low=low, high=low if high is None else high, beta=beta)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.shape == ()


def test_gradient_agrees_with_differences() -> None:
    inputs = example(1)
    logps_PMT = inputs.pop("logps_PMT").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pods_objective(x, **inputs, beta=0.1), (logps_PMT,))


@pytest.mark.parametrize("junk", [math.nan, -math.inf])
def test_values_outside_the_mask_are_ignored(junk: float) -> None:
    inputs = example(3)
    clean = inputs["logps_PMT"].clone().requires_grad_()
    pods_objective(**{**inputs, "logps_PMT": clean}, beta=0.1).backward()
    outside_PMT = ~inputs["mask_PMT"]
    dirty = {name: inputs[name].masked_fill(outside_PMT, junk) for name in ("old_logps_PMT", "ref_logps")}
    logps_PMT = inputs["logps_PMT"].masked_fill(outside_PMT, junk).requires_grad_()
    loss = pods_objective(**{**inputs, **dirty, "logps_PMT": logps_PMT, "mask_PMT": (~outside_PMT).long()}, beta=0.1)
    loss.backward()
    assert loss.item() == pods_objective(**inputs, beta=0.1).item()
    assert torch.equal(logps_PMT.grad, clean.grad)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logps_PMT": torch.zeros(3)}, ValueError, r"^logps .*\[3\]"),
        ({"mask_PMT": torch.zeros(2, 3, 1)}, ValueError, r"^mask .*\[2, 3, 1\]"),
        ({"advantages_PM": torch.zeros(6)}, ValueError, r"^advantages .*\[2, 3\].*\[6\]"),
        ({"ref_logps": None, "beta": 0.04}, ValueError, "^beta .*ref_logps"),
        ({"advantages_PM": torch.tensor([[0, 1, 0], [0, math.nan, 1]])}, ValueError, "advantages .*prompt 1, row 1"),
        ({"beta": math.nan}, ValueError, "^beta .*nan"),
        ({"mask_PMT": torch.full((2, 3, 5), 0.5)}, ValueError, "^mask "),
        ({"epsilon_low": "0.2"}, TypeError, "^epsilon_low .*'0.2'"),
        ({"logps_PMT": torch.zeros(2, 3, 5).to_sparse()}, TypeError, "^logps .*sparse_coo"),
        ({"logps_PMT": torch.zeros(2, 3, 5, dtype=torch.int64)}, TypeError, "^logps .*int64"),
    ],
)
def test_wrong_arguments_are_named(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pods_objective(**{**example(), **change})


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_a_mean_over_no_completions_is_refused(shape: tuple[int, int, int]) -> None:
    nothing_PMT = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"^logps "):
        pods_objective(nothing_PMT, nothing_PMT, torch.zeros(shape[:2]), nothing_PMT)
