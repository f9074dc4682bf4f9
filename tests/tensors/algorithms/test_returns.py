"""Returns-to-go, GAE and whitening, compared with loops over the definitions."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlrun.algorithms import Moments, gae, returns_to_go, whiten


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Draw rewards, values, mask and lengths of packed sequences, some without a sampled token."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    return rewards, values, mask, lengths


def sampled(mask: Tensor, lengths: list[int]) -> list[list[int]]:
    """Return the positions of each sequence's sampled tokens."""
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return [[j for j in range(s, s + n) if mask[j]] for s, n in zip(starts, lengths, strict=True)]


unit = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@settings(max_examples=40, deadline=None)
@given(row=rows(), gamma=unit, lam=unit)
def test_gae_equals_sum_over_later_tokens(
    row: tuple[Tensor, Tensor, Tensor, list[int]], gamma: float, lam: float
) -> None:
    rewards, values, mask, lengths = row
    expected = torch.zeros_like(rewards)
    final = torch.where(
        torch.arange(len(lengths)) % 2 == 0, values.sum(), 0.0
    )  # every second sequence was truncated and has a final value
    for places, end in zip(sampled(mask, lengths), final, strict=True):
        following = [*(values[j] for j in places[1:]), end][: len(places)]
        deltas = [rewards[j] + gamma * v - values[j] for j, v in zip(places, following, strict=True)]
        for k, j in enumerate(places):
            expected[j] = sum((gamma * lam) ** n * delta for n, delta in enumerate(deltas[k:]))
    scene = {"mask": mask, "sequence_lengths": lengths, "gamma": gamma, "lam": lam, "final_values": final}
    found = gae(rewards, values, **scene, whitened=False)
    torch.testing.assert_close(found.advantages, expected)
    torch.testing.assert_close(found.returns, torch.where(mask, expected + values, 0))
    white = gae(rewards, values, **scene)
    torch.testing.assert_close(white.advantages, whiten(expected, mask))
    assert torch.equal(white.returns, found.returns)


@settings(max_examples=40, deadline=None)
@given(row=rows(), gamma=unit)
def test_returns_to_go_skip_unsampled_tokens(row: tuple[Tensor, Tensor, Tensor, list[int]], gamma: float) -> None:
    rewards, _, mask, lengths = row
    expected = torch.zeros_like(rewards)
    for places in sampled(mask, lengths):
        for k, j in enumerate(places):
            expected[j] = sum(gamma**n * rewards[later] for n, later in enumerate(places[k:]))
    found = returns_to_go(rewards, mask=mask, sequence_lengths=lengths, gamma=gamma)
    torch.testing.assert_close(found, expected)
    noise = torch.where(mask, rewards, rewards + 1e3)
    assert torch.equal(returns_to_go(noise, mask=mask, sequence_lengths=lengths, gamma=gamma), found)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_returns_of_long_row_equal_loop(gamma: float, share: float) -> None:
    lengths = [4096, 1, 2047, 1025]
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(sum(lengths), generator=generator)
    mask = torch.rand(sum(lengths), generator=generator) < share
    expected = torch.zeros(sum(lengths), dtype=torch.float64)
    for places in sampled(mask, lengths):
        running = 0.0
        for j in reversed(places):
            running = float(rewards[j]) + gamma * running
            expected[j] = running
    found = returns_to_go(rewards, mask=mask, sequence_lengths=lengths, gamma=gamma)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counter of dispatched torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_long_row_needs_no_operation_per_token() -> None:
    tokens = 65536
    rewards, values, mask = torch.zeros(tokens), torch.randn(tokens), torch.ones(tokens, dtype=torch.bool)
    with Operations() as operations:
        gae(rewards, values, mask=mask, sequence_lengths=[tokens], gamma=0.99, lam=0.95)
    assert 0 < operations.count < 500


def test_outcome_reward_becomes_return_of_every_token() -> None:
    mask = torch.tensor([False, True, True, False, True, False, True])
    rewards = torch.tensor([0.0, 0, 0, 0, 1.0, 0, -2.0])
    assert returns_to_go(rewards, mask=mask, sequence_lengths=[5, 2]).tolist() == [0, 1, 1, 0, 1, 0, -2]
    half = returns_to_go(rewards, mask=mask, sequence_lengths=[5, 2], gamma=0.5)
    assert half.tolist() == [0, 0.25, 0.5, 0, 1, 0, -2]
    whole = returns_to_go(rewards.long(), mask=mask, sequence_lengths=[5, 2], gamma=0.5)
    assert torch.equal(whole, half)


@settings(max_examples=40, deadline=None)
@given(row=rows(), cut=st.integers(0, 30))
def test_moments_of_parts_sum_to_whole(row: tuple[Tensor, Tensor, Tensor, list[int]], cut: int) -> None:
    values, _, mask, _ = row
    kept = values[mask].tolist()
    moments = Moments.from_values(values[:cut], mask[:cut]) + Moments.from_values(values[cut:], mask[cut:])
    white = torch.cat([whiten(values[:cut], mask[:cut], moments), whiten(values[cut:], mask[cut:], moments)])
    torch.testing.assert_close(white, whiten(values, mask))
    if len(kept) > 1:
        expected = [(v - statistics.fmean(kept)) / (statistics.stdev(kept) + 1e-6) for v in kept]
        assert white[mask].tolist() == pytest.approx(expected, abs=1e-6)
    assert not white[~mask].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, "gamma must be at least 0 and at most 1, got 1.5"),
        ({"lam": -0.1}, "lam must be at least 0 and at most 1, got -0.1"),
        ({"rewards": torch.tensor([0.0, math.nan])}, "rewards is not finite: nan at token 1"),
        ({"values": torch.tensor([math.inf, 0.0])}, "values is not finite: inf at token 0"),
        ({"values": torch.zeros(3)}, r"values must have shape \[2\], got \[3\]"),
        ({"mask": torch.ones(3)}, r"mask must have shape \[2\], got \[3\]"),
        ({"rewards": torch.zeros(1, 2)}, r"rewards must be packed, of shape \[T\]"),
        ({"final_values": torch.zeros(2)}, r"final_values must have shape \[1\], got \[2\]"),
        ({"final_values": torch.tensor([math.nan])}, "final_values is not finite: nan at token 0"),
        ({"sequence_lengths": [1]}, "sequence_lengths add up to 1, but there are 2 tokens"),
    ],
)
def test_invalid_argument_is_named_in_error(changes: dict[str, Any], message: str) -> None:
    call = {"rewards": torch.zeros(2), "values": torch.zeros(2), "mask": torch.ones(2), "sequence_lengths": [2]}
    call |= changes
    with pytest.raises(ValueError, match=message):
        gae(call.pop("rewards"), call.pop("values"), **call)  # type: ignore[arg-type]
