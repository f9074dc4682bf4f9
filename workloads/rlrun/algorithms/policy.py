"""An objective as plain functions for scripts and notebooks. Each call binds the objective again; the trainer binds an `Objective` once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlrun.algorithms.inputs import LossBatch
from rlrun.algorithms.objective import LossOutput, Objective
from rlrun.algorithms.regularizers import Regularizers

NO_REGULARIZERS = Regularizers()


def policy_loss(
    name: str,
    logprobs: Tensor,
    batch: LossBatch,
    *,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    regularizers: Regularizers = NO_REGULARIZERS,
    correction: Mapping[str, object] | None = None,
    **options: object,
) -> LossOutput:
    """Return the sum of a per-token loss over the loss mask, divided by the denominator.

    Args:
        name: loss of an `Objective`.
        logprobs: log-probs of the packed tokens under the current policy, `[T]`; with `batch.entropy` the only input with a gradient.
        batch: all other tensors.
        aggregation, aggregation_length, regularizers, correction, options: see `Objective`.

    Returns:
        Result of a call of the `Objective`.

    Raises:
        ValueError: an argument is misaligned, not finite, unknown or out of range; the message contains its name.
    """
    objective = Objective(
        name,
        options,
        aggregation=aggregation,
        aggregation_length=aggregation_length,
        regularizers=regularizers,
        correction=correction,
    )
    return objective(logprobs, batch)


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
