"""Forward passes without a gradient over a batch, before the first update of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from rlrun.trainer.learning.forward import rows_logprobs
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.shard import fsdp_modules


@dataclass(frozen=True)
class Signals:
    """Auxiliary inputs of one row, each `[T]` fp32 and 0 outside the loss mask, or None if the objective does not read it."""

    proximal_logprobs: Tensor | None = None
    """Log-probs of the proximal policy."""
    reference_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    """Advantages that replace the batch's, computed by a critic or with a KL reward."""
    values: Tensor | None = None
    """Critic's values at the start of the step."""
    returns: Tensor | None = None
    """Targets of the critic."""


class ReferenceSource(Protocol):
    """Source of log-probs of a reference or teacher: a model in the trainer, or an engine."""

    def logprobs(self, rows: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens of each row at their sampling temperature, `[T]` fp32, 0 outside the mask.

        All ranks call it together, with the same number of rows.
        """
        ...


def logprobs_without_gradient(model: nn.Module, rows: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the log-probs of the loss tokens of each row under `model`, `[T]` fp32, 0 outside the mask."""
    found = rows_logprobs(model, rows)
    release_gathered(model)
    return found


def release_gathered(model: nn.Module) -> None:
    """Free the parameters that FSDP has gathered for a forward pass without a backward pass.

    FSDP keeps the root's parameters for the backward pass, and on a single rank also those of layers. Without this call the next pass
    computes with these old values, even after an optimizer step.
    """
    units: list[Any] = fsdp_modules(model)
    for unit in units:
        unit.reshard()
