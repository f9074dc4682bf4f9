"""Log-probabilities and entropies of an LM head, computed by chunks with the minimum of passes over the logits.

With z = logits / temperature and the residual r = softmax(z) - 1[target], a gradient g on the log-probability of a token results in

    d hidden = -g/temperature (r @ weight)         d weight = -r.T @ (g/temperature hidden)

so that gradients are never multiplied into a `[C, V]` tensor. `r @ weight` does not depend on g and may be computed in the forward pass.
If g is known in advance (`coefficients`), the weight's gradient is computed there too, and nothing is kept or recomputed (like the fused
linear cross entropy of Liger and torch, for a mean). A frozen weight needs no second pass either.

`EagerKernel` computes a chunk of float32 logits with torch operations, in place.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch
from loguru import logger
from torch import Tensor


class EagerKernel:
    """Float32 kernel for any device, used on CPU. It takes five reads and two writes of the logits, including the product with the
    weight.
    """

    forms_hidden_first = True
    """In the forward pass the product of residual and weight takes no additional read, and the entropy follows from it."""

    def logits(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, memory: Tensor | None) -> Tensor:
        """Compute logits divided by the temperatures, `[C, V]`, in `memory`. The hidden states are divided, because they have V/D times
        fewer numbers.
        """
        return torch.mm(hidden / temperatures[:, None], weight.T, out=memory)

    def statistics(self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
        """Compute the log-probability of each target, and the entropy if requested; `[C]` fp32 each."""
        logprobs = _softmax_in_place(logits, targets)
        return (logprobs, -torch.xlogy(logits, logits).sum(1)) if entropy else (logprobs,)

    def residual(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Replace the logits with `softmax - 1[target]` and return them with the log-probabilities; the entropy is None, because it
        follows from the product.
        """
        # With known log-probs only the probabilities are missing, which saves two reductions over
        # the vocabulary.
        if logprobs is None:
            logprobs = _softmax_in_place(logits, targets)
        else:
            _in_place(logits)
        one = logits.new_full((), -1.0).expand(len(targets), 1)
        return logits.scatter_add_(1, targets[:, None], one), logprobs, None


def _softmax_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Convert logits to probabilities in place and return the log-probabilities of the targets, exact even if a probability is 0 in
    float32.

    The largest probability is 1 / Σ exp(z - max z), so the sum follows from it without a second computation.
    """
    top = logits.amax(1)
    chosen = logits.gather(1, targets[:, None])[:, 0] - top
    _in_place(logits)
    return chosen + logits.amax(1).log()


def _in_place(logits: Tensor) -> None:
    """Apply softmax to each row in place. On CPU the kernel reads an element before it writes it; other devices do not guarantee this."""
    if logits.device.type == "cpu":
        torch.softmax(logits, 1, out=logits)
    else:
        logits.copy_(logits.softmax(1))


class HeadKernel(Protocol):
    """Kernel for one chunk of C tokens; temperatures are `[C]` fp32, targets `[C]` int64."""

    forms_hidden_first: bool
    """Whether `r @ weight` is computed in the forward pass even if the backward pass needs r too."""

    def logits(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, memory: Tensor | None) -> Tensor:
        """Compute the logits, `[C, V]` fp32, in `memory` if given."""
        ...

    def statistics(self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
        """Compute the log-probability of each target and, at least if requested, the entropy; may overwrite the logits."""
        ...

    def residual(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute r in `dtype`, log-probabilities, and the entropy or None if it follows from `r @ weight`; may overwrite the logits."""
        ...


@dataclass(frozen=True)
class Plan:
    """Parameters of the computation of a head."""

    kernel: HeadKernel
    chunk_tokens: int
    kept_bytes: int
    """Limit of bytes of residuals kept for the backward pass, which recomputes the others."""
    entropy: bool
    """Whether to compute the entropy even if it costs time; otherwise it may be 0."""
    reuses_memory: bool
    """Whether all chunks use one buffer. On CPU new memory pages cost more than the operations on them."""


def fused_kernel(hidden: Tensor) -> HeadKernel | None:
    """Return the kernel for this device and dtype, or None to use the general path."""
    if hidden.is_cuda:
        return _triton_kernel()
    return EagerKernel() if hidden.dtype == torch.float32 else None


@cache
def _triton_kernel() -> HeadKernel | None:
    missing = "" if find_spec("triton") else "triton is not installed"
    if not missing and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        missing = "triton needs a C compiler"
    if missing:
        logger.warning(f"the fused LM head is disabled, which costs about a tenth of a step: {missing}")
        return None
    from rlrun.trainer.learning.head.triton_kernels import TritonKernel

    return TritonKernel()


class _FusedContext(Protocol):
    """Context of `FusedHead` in the autograd graph."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]
    """Saved tensors; the last two, gradients of the hidden states and of the weight, may be None."""
    kept: dict[int, Tensor]
    """Residuals of chunks by their first token."""
    plan: Plan
    known: bool
    """Whether the gradients were computed in the forward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward pass."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Mark outputs without gradients."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether missing gradients are zeros instead of None."""


class FusedHead(torch.autograd.Function):
    """`apply(hidden, weight, targets, temperatures, coefficients, plan)` returns log-probabilities, entropies and a weighted sum.

    With coefficients only the sum of `coefficient * logprob` is differentiable. Without them only the log-probabilities are, and the sum
    is 0.
    """

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Plan], tuple[Tensor, Tensor, Tensor]]]

    @staticmethod
    def forward(
        ctx: _FusedContext,
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
            # Chunks beyond the memory limit share one buffer and keep no residual.
            own, y, t = hidden[part], targets[part], temperatures[part]
            left -= weight.element_size() * len(own) * len(weight)
            z = kernel.logits(own, weight, t, None if left >= 0 else memory.logits_buffer(len(own)))
            # Only statistics are needed: the backward pass recomputes this chunk.
            if d_hidden is None and left < 0:
                logprobs[part], *found = kernel.statistics(z, y, t, entropy=plan.entropy)
                if found:
                    entropy[part] = found[0]
                continue
            r, logprobs[part], known = kernel.residual(z, y, t, None, weight.dtype)
            if d_hidden is None:  # the backward pass computes the product from r; the kernel returned the entropy
                ctx.kept[part.start] = r
                if known is not None:
                    entropy[part] = known
                continue
            # The gradient of the hidden states, and the entropy as a by-product.
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
    def backward(ctx: _FusedContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
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
            # Removed while it is used, so that each chunk frees its memory for the next one.
            r = ctx.kept.pop(part.start, None)
            if r is None:
                z = kernel.logits(own, weight, t, memory.logits_buffer(len(own)))
                r = kernel.residual(z, y, t, logprobs[part], weight.dtype)[0]
                del z
            if of_hidden is not None and d_hidden is None:
                torch.mul(float32_product(r, weight), rates[part, None], out=of_hidden[part])
            add_product(of_weight, r.T, (own * rates[part, None]).to(own.dtype))
            del r
        return of_hidden, of_weight.to(weight.dtype), *nothing


class _Memory:
    """Reusable memory for the logits of successive chunks."""

    def __init__(self, plan: Plan, hidden: Tensor, weight: Tensor) -> None:
        self._shape = (min(plan.chunk_tokens, len(hidden)), len(weight))
        self._reused, self._device = plan.reuses_memory, hidden.device
        self._buffer: Tensor | None = None

    def logits_buffer(self, tokens: int) -> Tensor | None:
        """Return the same memory at every call, `[tokens, V]` fp32, or None if the operation allocates its own."""
        if not self._reused:
            return None
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        return self._buffer[:tokens]


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in float32; on CUDA the sums of a bfloat16 product are not rounded to bfloat16."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total += a @ b` with `total` in float32, in one pass if the device supports it."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_mixed(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += float32_product(a, b)


@cache
def _adds_mixed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch can add a product of `dtype` to a float32 sum in place; tested once, because older versions cannot."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17).all())


def scale_tensor(tensor: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor * factor` in the dtype of `like`, in one pass."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=like.dtype))


def _sum_like(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=torch.float32)


def _vocabulary_parts(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))
