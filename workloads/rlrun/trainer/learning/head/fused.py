"""Log-probabilities and entropies of an LM head, chunk by chunk, with as few passes over the logits as their gradient allows.

With z = logits / temperature and the residual r = softmax(z) - 1[target], a gradient g on the log-probability of a token gives

    d hidden = -g/temperature (r @ weight)         d weight = -r.T @ (g/temperature hidden)

so that no gradient is ever multiplied into a `[C, V]` tensor. `r @ weight` does not depend on g: it may be formed in the forward pass.
Where g is known before (`coefficients`), so is the weight's part, and nothing is kept or computed again (as Liger's and torch's
fused linear cross entropy do, for a mean). A weight without a gradient needs no second pass either.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from loguru import logger
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlrun.trainer.learning.head.eager import EagerKernel


class HeadKernel(Protocol):
    """Computation on one chunk of C tokens; temperatures are `[C]` fp32, targets `[C]` int64."""

    forms_hidden_first: bool
    """True if `r @ weight` is formed in the forward pass even where r is needed in the backward pass, too."""

    def logits(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, memory: Tensor | None) -> Tensor:
        """Logits `[C, V]` fp32, in `memory` where it is given."""
        ...

    def statistics(self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
        """Log-probability of each target and, at least where it is asked for, the entropy; the logits are gone afterwards."""
        ...

    def residual(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """r in `dtype`, log-probabilities, and the entropy where it does not follow from `r @ weight`; the logits are gone afterwards."""
        ...


@dataclass(frozen=True)
class Plan:
    """Choices of how a head is computed."""

    kernel: HeadKernel
    chunk_tokens: int
    kept_bytes: int
    """Most bytes of residuals that wait for the backward pass; the others are made again there."""
    entropy: bool
    """True if the entropy is wanted where it costs something; else it is 0 there."""
    reuses_memory: bool
    """True if one buffer serves all chunks. On CPU fresh pages cost more than the operations on them."""


def fused_kernel(hidden: Tensor) -> HeadKernel | None:
    """The kernel for hidden states of this device and dtype; None: there is none, and the general path computes them."""
    if hidden.is_cuda:
        return _triton_kernel()
    return EagerKernel() if hidden.dtype == torch.float32 else None


@cache
def _triton_kernel() -> HeadKernel | None:
    missing = "" if find_spec("triton") else "triton is not installed"
    if not missing and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        missing = "there is no C compiler, which triton needs"
    if missing:
        logger.warning(f"the LM head is not fused by triton, which costs about a tenth of a step: {missing}")
        return None
    from rlrun.trainer.learning.head.triton_kernels import TritonKernel

    return TritonKernel()


class FusedHead(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed for mypy
    """`apply(hidden, weight, targets, temperatures, coefficients, plan)` -> log-probabilities, entropies, and their weighted sum.

    With coefficients the sum of `coefficient * logprob` has the gradient and the log-probabilities have none; without them the sum is 0.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        coefficients: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel, needs_weight = plan.kernel, ctx.needs_input_grad[1]
        forms_hidden = any(ctx.needs_input_grad[:2]) and (
            coefficients is not None or not needs_weight or kernel.forms_hidden_first
        )
        logprobs, entropy = temperatures.new_zeros(len(hidden)), temperatures.new_zeros(len(hidden))
        rates = temperatures.reciprocal().neg_()
        if coefficients is not None:
            rates *= coefficients
        d_hidden = torch.empty_like(hidden) if forms_hidden else None
        d_weight = _sum_like(weight) if needs_weight and coefficients is not None else None
        ctx.kept, left = {}, plan.kept_bytes if needs_weight and coefficients is None else 0
        memory = _Memory(plan, hidden, weight)
        for part in _vocabulary_parts(len(hidden), plan.chunk_tokens):
            own, y, t = hidden[part], targets[part], temperatures[part]
            left -= weight.element_size() * len(own) * len(weight)
            z = kernel.logits(own, weight, t, None if left >= 0 else memory.of(len(own)))
            if d_hidden is None and left < 0:
                logprobs[part], *found = kernel.statistics(z, y, t, entropy=plan.entropy)
                if found:
                    entropy[part] = found[0]
                continue
            r, logprobs[part], known = kernel.residual(z, y, t, None, weight.dtype)
            if d_hidden is None:  # its product waits for the backward pass with it, and the kernel has the entropy
                ctx.kept[part.start] = r
                if known is not None:
                    entropy[part] = known
                continue
            pulled = float32_product(r, weight)
            # E[z] = z_y + hidden/temperature . (r @ weight), and H = -log p_y + z_y - E[z].
            if known is None:
                known = (-logprobs[part] - torch.linalg.vecdot(own, pulled) / t).clamp_(min=0)
            entropy[part] = known
            torch.mul(pulled, rates[part, None], out=d_hidden[part])
            if d_weight is not None:
                add_product(d_weight, r.T, (own * rates[part, None]).to(own.dtype))
            elif left >= 0:
                ctx.kept[part.start] = r
            del z, r
        if coefficients is None:
            total = logprobs.new_zeros(())
            ctx.mark_non_differentiable(entropy, total)
        else:
            total = torch.linalg.vecdot(logprobs, coefficients)
            ctx.mark_non_differentiable(logprobs, entropy)
        ctx.save_for_backward(hidden, weight, targets, temperatures, rates, logprobs, d_hidden, d_weight)
        ctx.plan, ctx.known = plan, coefficients is not None
        ctx.set_materialize_grads(False)
        return logprobs, entropy, total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, rates, logprobs, d_hidden, d_weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        nothing = (None,) * 4
        gradient = gradients[2] if ctx.known else gradients[0]
        if gradient is None:
            return None, None, *nothing
        if ctx.known:
            return (
                scale_tensor(d_hidden, gradient, hidden) if needs_hidden else None,
                scale_tensor(d_weight, gradient, weight) if needs_weight else None,
                *nothing,
            )
        of_hidden = None
        if needs_hidden:
            of_hidden = (
                torch.empty_like(hidden) if d_hidden is None else scale_tensor(d_hidden, gradient[:, None], hidden)
            )
        if not needs_weight:
            return of_hidden, None, *nothing
        kernel, plan = ctx.plan.kernel, ctx.plan
        of_weight, rates, memory = _sum_like(weight), rates * gradient, _Memory(plan, hidden, weight)
        for part in _vocabulary_parts(len(hidden), plan.chunk_tokens):
            own, y, t = hidden[part], targets[part], temperatures[part]
            r = ctx.kept.pop(part.start, None)
            if r is None:
                z = kernel.logits(own, weight, t, memory.of(len(own)))
                r = kernel.residual(z, y, t, logprobs[part], weight.dtype)[0]
                del z
            if of_hidden is not None and d_hidden is None:
                torch.mul(float32_product(r, weight), rates[part, None], out=of_hidden[part])
            add_product(of_weight, r.T, (own * rates[part, None]).to(own.dtype))
            del r
        return of_hidden, of_weight.to(weight.dtype), *nothing


class _Memory:
    """Memory for the logits of one chunk after the other."""

    def __init__(self, plan: Plan, hidden: Tensor, weight: Tensor) -> None:
        self._shape = (min(plan.chunk_tokens, len(hidden)), len(weight))
        self._reused, self._device = plan.reuses_memory, hidden.device
        self._buffer: Tensor | None = None

    def of(self, tokens: int) -> Tensor | None:
        """`[tokens, V]` fp32, the same memory at every call; None where the operation makes its own."""
        if not self._reused:
            return None
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        return self._buffer[:tokens]


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in float32: the sums of a bfloat16 product are not rounded to bfloat16 where the device can do so."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, with `total` in float32; one pass over it where the device adds as it multiplies."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_mixed(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += float32_product(a, b)


@cache
def _adds_mixed(device: torch.device, dtype: torch.dtype) -> bool:
    """True if this torch adds a product of `dtype` to a float32 sum in place. Tried once: the argument is newer than some versions."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17).all())


def scale_tensor(tensor: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """`tensor * factor` in the dtype of `like`, in one pass."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=like.dtype))


def _sum_like(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=torch.float32)


def _vocabulary_parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))
