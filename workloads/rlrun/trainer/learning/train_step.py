"""One optimizer step over this rank's part of a batch.

The loss of every micro-batch is a sum divided by a count over the *whole* batch (loss tokens, or sequences), and gradients are summed
over micro-batches and ranks: the step is exactly the objective's mean over the batch, however it is packed, cut and dealt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.algorithms import LossOutput, Mixture
from rlrun.algorithms.mixture import Divisors
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.packing.micro_batches import Row
from rlrun.trainer.learning.auxiliary_logprobs import Signals
from rlrun.trainer.learning.forward import MicroBatch, micro_batch, token_statistics, weighted_statistics
from rlrun.trainer.learning.gradient_accumulation import prepare_backward
from rlrun.trainer.modeling.shard import counts_here, local_part
from rlrun.trainer.ranks.group import Group

_IDLE = ""
"""Environment of a row without samples: none has this name."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rows: Sequence[Row],
    *,
    group: Group,
    loss: Mixture,
    lr: float,
    max_grad_norm: float | None,
    signals: Sequence[Signals] | None = None,
    agree: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Train on `rows`, this rank's micro-batches of `batch`; every rank has the same number of them.

    `loss` is the run's objective, with those of environments that have their own. `signals` are what passes before the update found, one
    for each row. Before each row all ranks call `agree` together; when it raises, on all of them, the step is abandoned and nothing is
    updated.

    Returns:
        The step's metrics, equal on all ranks: `loss`, `grad_norm`, `lr`, `entropy`, `mismatch_kl` and others of the loss, `tokens`
        (all of the batch), `loss_tokens`, `skipped` (1 when the gradient was not finite and nothing was updated), and the times
        `time/forward_backward` and `time/optimizer` in seconds; as `objective/<environment>/<name>` those of one environment.
    """
    started = time.perf_counter()
    divisors = _divisors(batch, loss)
    parts: list[dict[str, Tensor]] = []
    for index, row in enumerate(rows):
        agree()
        prepare_backward(model, last=index == len(rows) - 1)
        signal = signals[index] if signals is not None else Signals()
        samples = [batch.samples[sample] for sample in row]
        parts.append(_backward(model, samples, signal, loss, divisors, policy_version=batch.step - 1, group=group))
    has_reference = signals is not None and signals[0].reference_logprobs is not None
    metrics = loss.means(_over_ranks(loss.merged(parts, reference=has_reference), group), divisors)
    forward_backward = time.perf_counter()
    grad_norm, updated = apply_gradient(model, optimizer, lr=lr, max_grad_norm=max_grad_norm)
    finished = time.perf_counter()
    return metrics | {
        "grad_norm": grad_norm,
        "lr": lr,
        "skipped": float(not updated),
        "tokens": float(batch.tokens),
        "time/forward_backward": forward_backward - started,
        "time/optimizer": finished - forward_backward,
    }


def _backward(
    model: nn.Module,
    samples: Sequence[Sample],
    signal: Signals,
    loss: Mixture,
    divisors: Divisors,
    *,
    policy_version: int,
    group: Group,
) -> dict[str, Tensor]:
    """Add the gradient of one micro-batch; returns its metrics as sums."""
    inputs = micro_batch(samples, group.device)
    bound = partial(
        loss,
        environments=[sample.environment for sample in samples] or [_IDLE],
        divisors=divisors,
        inference_logprobs=inputs.inference_logprobs,
        advantages=inputs.advantages if signal.advantages is None else signal.advantages,
        sequence_lengths=inputs.packed.lengths,
        proximal_logprobs=signal.proximal_logprobs,
        reference_logprobs=signal.reference_logprobs,
        versions=inputs.versions,
        policy_version=policy_version,
    )
    if loss.is_linear:
        return _linear_backward(model, inputs, bound)
    statistics = token_statistics(model, inputs, entropy_gradient=loss.needs_entropy)
    # A forward pass that overflowed still takes part in the collectives; its gradient is not finite, so the update is left out.
    finite = torch.isfinite(statistics.logprobs).all()
    output = bound(
        torch.where(finite, statistics.logprobs, 0),
        mask=inputs.mask & finite,
        entropy=torch.where(finite, statistics.entropy, 0),
    )
    # Chosen on the device: the host does not wait for it.
    torch.where(finite, output.loss, statistics.logprobs.sum()).backward()
    return output.metrics


def _linear_backward(model: nn.Module, inputs: MicroBatch, loss: Callable[..., LossOutput]) -> dict[str, Tensor]:
    """The same for a loss whose gradient on the log-probs is known before they are: they are pulled back as they are made."""
    start = torch.zeros_like(inputs.advantages).requires_grad_()
    (coefficients,) = torch.autograd.grad(loss(start, mask=inputs.mask, entropy=start.detach()).loss, start)
    total, statistics = weighted_statistics(model, inputs, coefficients)
    total.backward()  # where the forward pass has overflowed this gradient is not finite
    finite = torch.isfinite(statistics.logprobs).all()
    return loss(
        torch.where(finite, statistics.logprobs, 0),
        mask=inputs.mask & finite,
        entropy=torch.where(finite, statistics.entropy, 0),
    ).metrics


def apply_gradient(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float, max_grad_norm: float | None
) -> tuple[float, bool]:
    """Clip the accumulated gradient and take the optimizer's step, unless the gradient is not finite; it is gone afterwards.

    Returns:
        The global norm before clipping, and whether anything was updated.
    """
    grad_norm = gradient_norm(model)
    updated = math.isfinite(grad_norm)
    if updated:
        if max_grad_norm is not None and grad_norm > max_grad_norm:
            _scale_gradients(model, max_grad_norm / (grad_norm + 1e-6))
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, updated


def _divisors(batch: Batch, loss: Mixture) -> Divisors:
    mask = torch.from_numpy(np.concatenate([sample.loss_mask for sample in batch.samples]))
    lengths = [len(sample) for sample in batch.samples]
    return loss.divisors(mask, lengths, [sample.environment for sample in batch.samples])


def _over_ranks(merged: Mapping[str, Tensor], group: Group) -> dict[str, float]:
    """Token sums and maxima of this rank -> those of the whole batch."""
    values = {name: float(value) for name, value in merged.items()}
    sums = group.data_sums({name: value for name, value in values.items() if not name.endswith("_max")})
    return sums | group.maxima({name: value for name, value in values.items() if name.endswith("_max")})


def gradient_norm(model: nn.Module) -> float:
    """The global L2 norm of the gradient over all parameters and ranks; what several ranks hold counts once."""
    squares = [
        local_part(parameter.grad).float().square().sum().double()
        for parameter in model.parameters()
        if parameter.grad is not None and counts_here(model, parameter)
    ]
    total = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return math.sqrt(float(total)) if math.isfinite(float(total)) else float(total)


def _scale_gradients(model: nn.Module, factor: float) -> None:
    gradients = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)


_BLOCK_WORDS = {"cpu": 2**16, "cuda": 2**22}
"""Elements that the checksum takes at a time, by device: what is between stays in its cache."""


def parameter_checksum(model: nn.Module) -> float:
    """A fingerprint of the trained parameters' bits that does not depend on how they are sharded: equal bits give equal numbers.

    The sum of w(2w + 1) mod 2^32 over all 32-bit words w. This polynomial is one-to-one (Rivest 2001, Permutation polynomials modulo 2^w)
    and not linear, so that changes do not cancel each other. Sums of integers are exact in any order; 52 bits of it fit a float64.
    """
    sums = []
    for parameter in model.parameters():
        if not parameter.requires_grad or not counts_here(model, parameter):
            continue
        words = local_part(parameter.detach()).contiguous().view(torch.int32).flatten()
        blocks = words.split(_BLOCK_WORDS.get(words.device.type, max(words.numel(), 1)))
        sums += [torch.addcmul(block, block, block, value=2).sum(dtype=torch.int64) for block in blocks]
    # One copy to the host, however many parameters there are.
    total = torch.stack(sums).sum().cpu() if sums else torch.zeros((), dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(int(total) % 2**52)
