"""A chunk of float32 logits, by torch's own operations. Everything happens in the memory that the logits are in."""

from __future__ import annotations

import torch
from torch import Tensor


class EagerKernel:
    """Float32 on any device; the CPU's kernel. Five reads and two writes of the logits, the product with the weight among them."""

    forms_hidden_first = True
    """The product of residual and weight costs no read more in the forward pass, and gives the entropy."""

    def logits(self, hidden: Tensor, weight: Tensor, temperatures: Tensor, memory: Tensor | None) -> Tensor:
        """Logits over the temperatures `[C, V]`, in `memory`. Hidden states are divided: they are V/D times fewer."""
        return torch.mm(hidden / temperatures[:, None], weight.T, out=memory)

    def statistics(self, logits: Tensor, targets: Tensor, temperatures: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
        """Log-probability of each target, and the entropy where it is asked for; `[C]` fp32 each."""
        logprobs = _softmax_in_place(logits, targets)
        return (logprobs, -torch.xlogy(logits, logits).sum(1)) if entropy else (logprobs,)

    def residual(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor, logprobs: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`softmax - 1[target]` in the place of the logits, the log-probabilities, and no entropy: it follows from the product."""
        if logprobs is None:
            logprobs = _softmax_in_place(logits, targets)
        else:
            _in_place(logits)
        one = logits.new_full((), -1.0).expand(len(targets), 1)
        return logits.scatter_add_(1, targets[:, None], one), logprobs, None


def _softmax_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Turn logits into probabilities in place; log-probabilities of the targets, exact where the probability is 0 in float32.

    The largest probability is 1 over the sum of all `exp(z - max z)`: the sum is read off instead of being formed a second time.
    """
    top = logits.amax(1)
    chosen = logits.gather(1, targets[:, None])[:, 0] - top
    _in_place(logits)
    return chosen + logits.amax(1).log()


def _in_place(logits: Tensor) -> None:
    """Softmax of each row. On CPU the kernel reads an element before it writes it; elsewhere nothing says so."""
    if logits.device.type == "cpu":
        torch.softmax(logits, 1, out=logits)
    else:
        logits.copy_(logits.softmax(1))
