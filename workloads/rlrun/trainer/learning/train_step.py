"""One optimizer step over this rank's part of a batch.

The loss of every micro-batch is a sum divided by a count over the *whole* batch (loss tokens, or sequences), and gradients are summed
over micro-batches and ranks. Therefore a step is exactly the objective's mean over the batch, for every packing and distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.algorithms import LossBatch, LossOutput, Mixture
from rlrun.algorithms.objective_mixture import Divisors
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.forward import Signals, stage_output, token_statistics, weighted_statistics
from rlrun.trainer.learning.optim.update import Stopwatch, apply_gradient
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import MicroBatch, micro_batches
from rlrun.trainer.modeling.gradient_accumulation import prepare_backward
from rlrun.trainer.modeling.parallel.pipeline import run_rows
from rlrun.trainer.modeling.parallel.pipeline_stages import add_shared_gradients, stage_of
from rlrun.trainer.modeling.parallel.sharded_rows import part_tokens
from rlrun.trainer.modeling.shard import counts_here, local_part
from rlrun.trainer.ranks.group import Group

Objective = Callable[[int, Tensor | None], Tensor]
"""Function from the number of a row, and in a pipeline the previous stage's output, to the scalar for the backward pass."""
_IDLE = ""
"""Environment name of a row without samples; real environments have nonempty names."""


@dataclass(frozen=True)
class Prepared:
    """Results of the passes before an update, and the stop point of the step."""

    signals: Sequence[Signals] | None = None
    """Auxiliary inputs of each row."""
    inputs: Sequence[MicroBatch] | None = None
    """Rows on the device. Default: copy them."""
    check_stop: Callable[[], None] = lambda: None
    """Stop point that all ranks call before each row (with a pipeline only before the first). If it raises (on all ranks), the step is
    abandoned without an update.
    """


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    update: Update,
    *,
    group: Group,
    loss: Mixture,
    lr: float,
    max_grad_norm: float | None,
    prepared: Prepared = Prepared(),
) -> dict[str, float]:
    """Run one optimizer step. All ranks call it together with the same number of rows; the host waits for the device once, at the end.

    Args:
        model, optimizer, update: sharded policy, its optimizer, and samples with this rank's rows.
        group: all ranks.
        loss: objective of the run and its environments.
        lr, max_grad_norm: learning rate, and largest global norm of the gradient (None for no clipping).
        prepared: results of earlier passes.

    Returns:
        Metrics of the step, equal on all ranks: `loss`, `grad_norm`, `lr`, `entropy`, `mismatch_kl` and others of the loss, `tokens` (of
        the whole batch), `loss_tokens`, `skipped` (1 if the gradient was not finite and the update was skipped), and the times
        `time/forward_backward` and `time/optimizer` in seconds; metrics of one environment as `objective/<environment>/<name>`.
    """
    batch, signals, watch = update.batch, prepared.signals, Stopwatch(group.device)
    samples = [[batch.samples[sample] for sample in row] for row in update.rows]
    inputs = micro_batches(samples, group.device) if prepared.inputs is None else prepared.inputs
    _check_versions(batch, loss)
    divisors = _loss_divisors(batch, loss)
    parts: list[dict[str, Tensor]] = []

    def compute(index: int, received: Tensor | None) -> Tensor:
        objective, metrics = _row_objective(
            model,
            inputs[index],
            signals[index] if signals is not None else Signals(),
            loss,
            divisors,
            environments=[sample.environment for sample in samples[index]] or [_IDLE],
            policy_version=batch.step - 1,
            received=received,
        )
        parts.append(metrics)
        return objective

    _run_backward(model, inputs, compute, prepared.check_stop)
    has_reference = signals is not None and signals[0].reference_logprobs is not None
    merged = loss.add_metrics(parts, reference=has_reference) if parts else {}
    watch.record_mark()
    applied = apply_gradient(model, optimizer, lr=lr, max_grad_norm=max_grad_norm, values=merged)
    watch.record_mark()
    times = dict(zip(("time/forward_backward", "time/optimizer"), watch.lap_seconds(), strict=True))
    return loss.reported_means(_over_ranks(applied.values, group), divisors) | {
        "grad_norm": applied.grad_norm,
        "lr": lr,
        "skipped": float(not applied.updated),
        "tokens": float(batch.tokens),
        **times,
    }


def _run_backward(
    model: nn.Module, inputs: Sequence[MicroBatch], objective: Objective, check_stop: Callable[[], None]
) -> None:
    """Accumulate the gradients of all micro-batches; in a pipeline the last stage computes the objective."""
    stage = stage_of(model)
    if stage is None:
        for index in range(len(inputs)):
            check_stop()
            prepare_backward(model, last=index == len(inputs) - 1)
            # Each row's backward pass frees its activations before the next row allocates its own.
            objective(index, None).backward()
        return

    def compute(number: int, index: int, received: Tensor | None) -> Tensor:
        if stage.computes_loss(number):
            return objective(index, received)
        return stage_output(model, inputs[index], received, number)

    check_stop()  # only once, because ranks of different stages do not reach the boundaries between rows together
    tokens = [part_tokens(model, len(row.input_ids)) for row in inputs]
    run_rows(model, stage, tokens, compute, backward=True)
    add_shared_gradients(model)


def _row_objective(
    model: nn.Module,
    inputs: MicroBatch,
    signal: Signals,
    loss: Mixture,
    divisors: Divisors,
    *,
    environments: Sequence[str],
    policy_version: int,
    received: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the scalar for the backward pass of one micro-batch, and its metrics as sums. `received`: see `token_statistics`."""
    batch = LossBatch(
        inference_logprobs=inputs.inference_logprobs,
        advantages=inputs.advantages if signal.advantages is None else signal.advantages,
        mask=inputs.mask,
        sequence_lengths=inputs.packed.lengths,
        proximal_logprobs=signal.proximal_logprobs,
        reference_logprobs=signal.reference_logprobs,
        versions=inputs.versions,
        policy_version=policy_version,
        sequence_ids=inputs.sequence_ids,
        checked=True,  # `read_checked` has checked every value on the host
    )
    bound = partial(loss, environments=environments, divisors=divisors)
    if loss.is_linear:
        return _linear_objective(model, inputs, batch, bound, received)
    statistics = token_statistics(model, inputs, entropy_gradient=loss.needs_entropy, received=received)
    # After an overflow the backward pass still runs its collectives. Its gradient is not finite, so the update is skipped.
    finite = torch.isfinite(statistics.logprobs).all()
    output = bound(
        torch.where(finite, statistics.logprobs, 0),
        replace(batch, mask=inputs.mask & finite, entropy=torch.where(finite, statistics.entropy, 0)),
    )
    # Selected on the device, so that the host does not wait.
    return torch.where(finite, output.loss, statistics.logprobs.sum()), output.metrics


def _linear_objective(
    model: nn.Module,
    inputs: MicroBatch,
    batch: LossBatch,
    loss: Callable[..., LossOutput],
    received: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the same for a loss whose gradient on the log-probs is known in advance, in one pass over the logits."""
    start = torch.zeros_like(inputs.advantages).requires_grad_()
    # The loss is linear in the log-probs, so its gradient at any point is its gradient everywhere;
    # zeros avoid a forward pass.
    (coefficients,) = torch.autograd.grad(loss(start, replace(batch, entropy=start.detach())).loss, start)
    total, statistics = weighted_statistics(model, inputs, coefficients, received=received)
    finite = torch.isfinite(statistics.logprobs).all()  # after an overflow the gradient is not finite either
    return total, loss(
        torch.where(finite, statistics.logprobs, 0),
        replace(batch, mask=inputs.mask & finite, entropy=torch.where(finite, statistics.entropy, 0)),
    ).metrics


def _check_versions(batch: Batch, loss: Mixture) -> None:
    """Check the versions on the host, because the loss would need a copy from the device. Only a replay can contain later versions."""
    reads_versions = any(objective.proximal == "log_linear" for objective in loss.objectives)
    if reads_versions and batch.max_version >= batch.step:
        raise ValueError(f"versions must be at most policy_version ({batch.step - 1}), got {batch.max_version}")


def _loss_divisors(batch: Batch, loss: Mixture) -> Divisors:
    mask = torch.from_numpy(np.concatenate([sample.loss_mask for sample in batch.samples]))
    lengths = [len(sample) for sample in batch.samples]
    return loss.divisors(mask, lengths, [sample.environment for sample in batch.samples])


def _over_ranks(values: Mapping[str, float], group: Group) -> dict[str, float]:
    """Combine the sums and maxima of all ranks."""
    if group.dims.pp > 1:  # only the last stage has values
        names = group.broadcast(list(values), root=group.dims.head_place * group.dims.stage_size)
        values = {name: values.get(name, -math.inf if name.endswith("_max") else 0.0) for name in names}
    sums = group.data_sums({name: value for name, value in values.items() if not name.endswith("_max")})
    return sums | group.max_over_ranks({name: value for name, value in values.items() if name.endswith("_max")})


_BLOCK_WORDS = {"cpu": 2**16, "cuda": 2**22}
"""Elements per block of the checksum, by device; intermediate results of a block fit into its cache."""


def parameter_checksum(model: nn.Module) -> float:
    """Return a checksum of the bits of all trained parameters, which does not depend on the sharding.

    It is the sum of w(2w + 1) mod 2^32 over all 32-bit words w. This polynomial is one-to-one (Rivest 2001, Permutation polynomials
    modulo 2^w) and not linear, so that changes do not cancel. Sums of integers are exact in any order; the result has 52 bits, which fit
    into a float64.
    """
    sums = []
    for parameter in model.parameters():
        if not parameter.requires_grad or not counts_here(model, parameter):
            continue
        words = local_part(parameter.detach()).contiguous().view(torch.int32).flatten()
        blocks = words.split(_BLOCK_WORDS.get(words.device.type, max(words.numel(), 1)))
        sums += [torch.addcmul(block, block, block, value=2).sum(dtype=torch.int64) for block in blocks]
    # One copy to the host for all parameters.
    total = torch.stack(sums).sum().cpu() if sums else torch.zeros((), dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(int(total) % 2**52)
