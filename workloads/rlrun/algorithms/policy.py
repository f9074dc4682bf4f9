"""An objective as plain functions for scripts and notebooks. Each call binds the objective again; the trainer binds an `Objective` once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlrun.algorithms.objective import LossOutput, Objective
from rlrun.algorithms.regularizers import Regularizers

NO_REGULARIZERS = Regularizers()


def policy_loss(
    name: str,
    logprobs: Tensor,
    *,
    inference_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_lengths: Sequence[int],
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    regularizers: Regularizers = NO_REGULARIZERS,
    entropy: Tensor | None = None,
    correction: Mapping[str, object] | None = None,
    **options: object,
) -> LossOutput:
    """The sum of a per-token loss over the loss mask, divided by `denominator`.

    Args:
        name: the loss of an `Objective`.
        logprobs: `[T]` log-probs of the packed tokens under the current policy; with `entropy` the only input with a gradient.
        inference_logprobs: `[T]`, as sampled, at the same temperature.
        advantages: `[T]`, or one per sequence `[S]`.
        mask: `[T]` bool (or 0 and 1), true on tokens to train on. The others change nothing, as long as they are finite.
        sequence_lengths: S positive lengths that add up to T.
        proximal_logprobs: `[T]`, read by clipped losses and `sapo` (default `inference_logprobs`), `decoupled_ppo` and a correction.
        reference_logprobs: `[T]`, read by `ref_kl`, `distill`, `masked_is` with a teacher_tau, a KL regulariser, and for the metric
            `reference_kl`.
        denominator: what the sum is divided by, normally `denominator_count` added up over all micro-batches and
            ranks; default: that of this batch alone.
        entropy: `[T]` nats, differentiable; for an entropy bonus.
        aggregation, aggregation_length, regularizers, correction, options: as of `Objective`.

    Returns:
        As an `Objective` when it is called.

    Raises:
        ValueError: names the argument that is misaligned, not finite, unknown or out of range.
    """
    objective = Objective(
        name,
        options,
        aggregation=aggregation,
        aggregation_length=aggregation_length,
        regularizers=regularizers,
        correction=correction,
    )
    return objective(
        logprobs,
        inference_logprobs=inference_logprobs,
        advantages=advantages,
        mask=mask,
        sequence_lengths=sequence_lengths,
        denominator=denominator,
        entropy=entropy,
        reference_logprobs=reference_logprobs,
        proximal_logprobs=proximal_logprobs,
    )


def denominator_count(
    name: str,
    mask: Tensor,
    sequence_lengths: Sequence[int],
    *,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    **options: object,
) -> Tensor:
    """Return this batch's contribution to the denominator of `policy_loss`, a scalar; see `Objective.count`."""
    objective = Objective(name, options, aggregation=aggregation, aggregation_length=aggregation_length)
    return objective.count(mask, sequence_lengths)
