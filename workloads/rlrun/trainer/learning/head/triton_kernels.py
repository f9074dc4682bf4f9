"""Triton kernels for a chunk of float32 logits: statistics in one read, the residual in one read and one bfloat16 write.

One program processes one row. Triton's interpreter can run the kernels on CPU; the tests use it to compare them with float64.
"""

# Triton evaluates the annotations of its functions, so this module must not import `annotations`: `tl.constexpr` must be a value.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program processes at a time."""
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed for mypy
def _statistics(logits, targets, temperatures, logprobs, entropies, vocabulary, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute log-probability of the target and entropy of one row; the sums are rescaled at each larger logit (online softmax).

    With m the largest logit so far: S = sum of exp(z - m), T = sum of (z - m) exp(z - m). At the end H = log S - T/S, whose terms are at
    most of order log V for any size of the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * stride
    scale = 1.0 / tl.load(temperatures + row)
    top = tl.load(start_of_row) * scale
    total = 0.0
    moment = 0.0
    for start in range(0, vocabulary, width):
        columns = start + tl.arange(0, width)
        inside = columns < vocabulary
        z = tl.load(start_of_row + columns, mask=inside, other=float("-inf")) * scale
        higher = tl.maximum(top, tl.max(z, axis=0))
        weight = tl.exp(z - higher)
        shift = top - higher
        decay = tl.exp(shift)
        moment = decay * (moment + shift * total) + tl.sum(tl.where(inside, z - higher, 0.0) * weight, axis=0)
        total = decay * total + tl.sum(weight, axis=0)
        top = higher
    chosen = tl.load(start_of_row + tl.load(targets + row)) * scale
    tl.store(logprobs + row, chosen - top - tl.log(total))
    tl.store(entropies + row, tl.log(total) - moment / total)


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed for mypy
def _residual(logits, targets, temperatures, logprobs, residual, vocabulary, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute `softmax - 1[target]` of one row. The sum of exponentials follows from the target's logit and its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * stride
    scale = 1.0 / tl.load(temperatures + row)
    target = tl.load(targets + row)
    normalizer = tl.load(start_of_row + target) * scale - tl.load(logprobs + row)
    for start in range(0, vocabulary, width):
        columns = start + tl.arange(0, width)
        inside = columns < vocabulary
        z = tl.load(start_of_row + columns, mask=inside, other=float("-inf")) * scale
        p = tl.exp(z - normalizer) - tl.where(columns == target, 1.0, 0.0)
        tl.store(residual + row * stride + columns, p.to(residual.dtype.element_ty), mask=inside)


class TritonKernel:
    """Kernel for hidden states of any dtype, with float32 logits and residuals in the dtype of the weight."""

    forms_hidden_first = False
    """A residual of the forward pass would have to be recomputed for the weight's gradient."""

    def logits(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, memory: Tensor | None) -> Tensor:
        """Compute logits `[C, V]` without the division by temperatures, which the kernels apply. `memory` is unused, because CUDA's
        allocator caches memory.
        """
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return (hidden @ weight.T).float()

    def statistics(self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
        """Compute the log-probability of each target and the entropy, `[C]` fp32 each."""
        rows, vocabulary = logits.shape
        found = torch.empty_like(temperatures), torch.empty_like(temperatures)
        _statistics[(rows,)](
            logits, targets, temperatures, *found, vocabulary, logits.stride(0), width=BLOCK, num_warps=WARPS
        )
        return found

    def residual(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute `softmax - 1[target]` `[C, V]` and log-probabilities; also the entropy if the log-probabilities were not given."""
        entropy = None
        if logprobs is None:
            logprobs, entropy = self.statistics(logits, targets, temperatures, entropy=True)
        rows, vocabulary = logits.shape
        found = torch.empty_like(logits, dtype=dtype)
        _residual[(rows,)](
            logits, targets, temperatures, logprobs, found, vocabulary, logits.stride(0), width=BLOCK, num_warps=WARPS
        )
        return found, logprobs, entropy
