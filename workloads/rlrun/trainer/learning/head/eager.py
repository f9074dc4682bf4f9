"""Kernel for a chunk of float32 logits with torch operations, in place."""

from __future__ import annotations

import torch
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
