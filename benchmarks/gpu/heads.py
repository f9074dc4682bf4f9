"""Ways to compute the LM head: forward and backward of a row, in milliseconds and GiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import milliseconds, peak_gib
from benchmarks.gpu.shapes import Shape
from rlrun.trainer.learning.lm_head import head_statistics, logits_statistics, weighted_logprobs

Head = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def chunks_of_4096(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The trainer's, with fewer sums into the weight's gradient."""
    return head_statistics(hidden, weight, targets, temperatures, chunk_tokens=4_096)


def general_path(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The trainer's where the entropy has a gradient: every head's, before it was fused."""
    return head_statistics(hidden, weight, targets, temperatures, entropy="gradient")


def known_coefficients(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The trainer's for supervised fine-tuning: gradients formed in the forward pass. Its sum stands for the log-probabilities."""
    weighted = weighted_logprobs(hidden, weight, targets, temperatures, torch.ones_like(temperatures))
    return (
        (weighted[0], weighted[2]) if weighted is not None else head_statistics(hidden, weight, targets, temperatures)
    )


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """All logits of the row at once."""
    return logits_statistics(hidden @ weight.T, targets, temperatures)


def compiled_logits(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The same, compiled: what fusing alone brings."""
    compiled: Head = torch.compile(full_logits, dynamic=False) if hidden.is_cuda else full_logits
    return compiled(hidden, weight, targets, temperatures)


VARIANTS: dict[str, Head] = {
    "trainer": head_statistics,
    "trainer, 4,096 tokens a chunk": chunks_of_4096,
    "trainer, coefficients known": known_coefficients,
    "trainer, general path": general_path,
    "full logits, compiled": compiled_logits,
    "full logits": full_logits,
}


def head_inputs(shape: Shape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random hidden states and weight in bfloat16, targets, and temperatures of 0.5 to 2."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, shape.hidden, generator=generator)
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=generator) * 0.02
    targets = torch.randint(shape.vocabulary, (tokens,), generator=generator)
    temperatures = 0.5 + 1.5 * torch.rand(tokens, generator=generator)
    leaves = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in (hidden, weight)]
    return leaves[0], leaves[1], targets.to(device), temperatures.to(device)


def head_cost(name: str, shape: Shape, tokens: int, device: torch.device) -> dict[str, Any]:
    """Log-probabilities with a gradient, and entropies without one."""
    hidden, weight, targets, temperatures = head_inputs(shape, tokens, device)

    def work() -> None:
        logprobs, _ = VARIANTS[name](hidden, weight, targets, temperatures)
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    return {"tokens": tokens, "ms": milliseconds(work, device, repeats=5), "GiB": peak_gib(work, device)}
