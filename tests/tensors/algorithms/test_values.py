"""Value loss and explained variance, compared with their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlrun.algorithms import Moments, explained_variance, value_loss


def draw(seed: int = 0, tokens: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values, returns, moves = (torch.randn(tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    return {
        "values": values,
        "returns": returns,
        "old_values": values + 0.5 * moves,
        "mask": torch.rand(tokens, generator=generator) < 0.7,
    }


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_definition(clip: float | None) -> None:
    drawn = draw()
    values = drawn.pop("values").requires_grad_()
    found = value_loss(values, **drawn, clip=clip)
    found.loss.backward()

    total, gradient, cut = 0.0, np.zeros(len(values)), 0
    kept = int(drawn["mask"].sum())
    for j, (v, target, old, mask) in enumerate(
        zip(
            values.tolist(),
            drawn["returns"].tolist(),
            drawn["old_values"].tolist(),
            drawn["mask"].tolist(),
            strict=True,
        )
    ):
        if not mask:
            continue
        plain, slope = (v - target) ** 2, v - target
        if clip is not None:
            near = min(max(v, old - clip), old + clip)
            if (near - target) ** 2 > plain and near != v:
                plain, slope, cut = (near - target) ** 2, 0.0, cut + 1
        total += plain / 2 / kept
        gradient[j] = slope / kept
    assert float(found.loss.detach()) == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(values.grad.numpy(), gradient, atol=1e-12)
    assert float(found.clipped) == cut
    assert clip is None or cut > 0


def test_value_loss_parts_sum_to_whole() -> None:
    drawn = draw(1)
    whole = float(value_loss(**drawn, clip=0.1).loss)
    count = float(drawn["mask"].sum())
    parts = [
        float(value_loss(**{name: tensor[part] for name, tensor in drawn.items()}, clip=0.1, denominator=count).loss)
        for part in (slice(0, 7), slice(7, 8), slice(8, 40))
    ]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)
    damaged = drawn | {"returns": torch.where(drawn["mask"], drawn["returns"], 1e6)}
    assert float(value_loss(**damaged, clip=0.1).loss) == whole


def test_value_loss_without_tokens_has_zero_gradient() -> None:
    values = torch.ones(3, requires_grad=True)
    none = torch.zeros(3, dtype=torch.bool)
    loss = value_loss(values, returns=torch.ones(3), old_values=torch.ones(3), mask=none, clip=0.2).loss
    loss.backward()
    assert float(loss) == 0.0
    assert values.grad is not None
    assert not values.grad.any()


def test_value_loss_refuses_invalid_input() -> None:
    drawn = draw()
    with pytest.raises(ValueError, match=r"returns must have shape \[40\], got \[39\]"):
        value_loss(**drawn | {"returns": drawn["returns"][1:]})
    with pytest.raises(ValueError, match="clip must be greater than 0, got 0"):
        value_loss(**drawn, clip=0.0)


def test_explained_variance_of_perfect_and_constant_critic() -> None:
    drawn = draw(2)
    mask, returns, values = drawn["mask"], drawn["returns"], drawn["values"]

    def explained(of: torch.Tensor) -> float:
        return explained_variance(Moments.from_values(returns, mask), Moments.from_values(returns - of, mask))

    expected = 1 - np.var((returns - values)[mask].numpy()) / np.var(returns[mask].numpy())
    assert explained(values) == pytest.approx(expected, rel=1e-9)
    assert explained(returns) == 1.0
    assert explained(torch.full_like(returns, 3.0)) == pytest.approx(0.0, abs=1e-12)
    flat = Moments.from_values(torch.ones(5), torch.ones(5, dtype=torch.bool))
    assert explained_variance(flat, flat) == 0.0
