"""LM heads by definition in float64, and as the trainer computes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.trainer.learning.lm_head import head_statistics, weighted_logprobs


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperatures: Tensor
    coefficients: Tensor


def inputs(tokens: int, size: int, vocabulary: int, *, seed: int = 0, scale: float = 1.0) -> Inputs:
    """Return inputs in float64, with temperatures of 0.5 to 2."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Inputs(
        scale * normal(tokens, size) / size**0.5,
        normal(vocabulary, size),
        torch.randint(vocabulary, (tokens,), generator=generator),
        0.5 + 1.5 * torch.rand(tokens, generator=generator, dtype=torch.float64),
        normal(tokens),
    )


class Found(NamedTuple):
    logprobs: Tensor
    entropy: Tensor
    d_hidden: Tensor | None
    d_weight: Tensor | None


def definition(of: Inputs) -> Found:
    hidden, weight = of.hidden.clone().requires_grad_(), of.weight.clone().requires_grad_()
    log_p = (hidden @ weight.T / of.temperatures[:, None]).log_softmax(1)
    logprobs = log_p.gather(1, of.targets[:, None])[:, 0]
    d_hidden, d_weight = torch.autograd.grad((logprobs * of.coefficients).sum(), (hidden, weight))
    return Found(logprobs.detach(), -(log_p.exp() * log_p).sum(1).detach(), d_hidden, d_weight)


def computed(of: Inputs, *, known: bool, chunk: int, dtype: torch.dtype = torch.float32, frozen: bool = False) -> Found:
    hidden = of.hidden.to(dtype).requires_grad_()
    weight = of.weight.to(dtype).requires_grad_(not frozen)
    temperatures, coefficients = of.temperatures.float(), of.coefficients.float()
    if known:
        given = weighted_logprobs(hidden, weight, of.targets, temperatures, coefficients, chunk_tokens=chunk)
        assert given is not None
        total, logprobs, entropy = given
        assert not logprobs.requires_grad
        torch.testing.assert_close(total.detach(), (logprobs * coefficients).sum(), rtol=1e-5, atol=1e-5)
    else:
        logprobs, entropy = head_statistics(hidden, weight, of.targets, temperatures, chunk_tokens=chunk)
        total = (logprobs * coefficients).sum()
    assert not entropy.requires_grad
    leaves = [hidden] if frozen else [hidden, weight]
    torch.autograd.grad(total, leaves, retain_graph=True)  # the second backward pass finds the saved tensors freed
    gradients = torch.autograd.grad(total, leaves)
    return Found(logprobs.detach(), entropy, gradients[0], None if frozen else gradients[1])


def near(found: Found, expected: Found, *, values: float, gradients: float) -> None:
    """Fail if errors are too large; they are relative above 1, because softmax - 1 is a difference, which may be small."""
    for own, exact in zip(found[:2], expected[:2], strict=True):
        assert float((own.double() - exact).abs().max()) <= values * max(1.0, float(exact.abs().max()))
    for own, exact in zip(found[2:], expected[2:], strict=True):
        if own is not None:
            assert float((own.double() - exact).norm()) <= gradients * max(1.0, float(exact.norm()))
