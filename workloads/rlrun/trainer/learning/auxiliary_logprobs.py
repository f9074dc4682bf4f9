"""Forward passes without a gradient over a batch before it is trained on."""

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
    """Auxiliary inputs for one row. All `[T]` fp32, 0 outside the loss mask; None where the objective does not read it."""

    proximal_logprobs: Tensor | None = None
    """Log-probs under the policy at the start of the step, or its stand-in."""
    reference_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    """Advantages that a critic makes of the rewards, instead of those of the batch."""
    values: Tensor | None = None
    """Values of the critic at the start of the step."""
    returns: Tensor | None = None
    """Targets that the critic learns."""


class ReferenceSource(Protocol):
    """Source of log-probs of a reference or teacher. The trainer itself is one source; an engine can be another."""

    def logprobs(self, rows: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-prob of every loss token of each row, at the temperature it was sampled with; `[T]` fp32 each, 0 outside the mask.

        Every rank calls it together, with the same number of rows.
        """
        ...


def logprobs_without_gradient(model: nn.Module, rows: Sequence[MicroBatch]) -> list[Tensor]:
    """Log-probs of the loss tokens of all rows under `model`, `[T]` fp32 each, 0 outside the mask."""
    found = rows_logprobs(model, rows)
    release_gathered(model)
    return found


def release_gathered(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered: FSDP keeps the root's parameters for the backward pass, and
    on a single rank those of layers may stay as well. The next pass would compute with them, whatever the optimizer did meanwhile."""
    units: list[Any] = fsdp_modules(model)
    for unit in units:
        unit.reshard()
