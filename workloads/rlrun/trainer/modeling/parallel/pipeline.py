"""Pipeline parallelism, a step: rows of unequal length through all stages by torch's schedules.

torch's stages send tensors of one shape. A row is computed at its own length; what goes to the next stage is filled up with zeros to the
longest row of the step, and cut again there, so that only bytes on the link are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import pad

from rlrun.trainer.learning.gradient_accumulation import prepare_backward
from rlrun.trainer.modeling.parallel.stages import Stage

Compute = Callable[[int, Tensor | None], Tensor]
"""Stage's computation of one row: its number and what the stage before made of it `[P, D]` (None on the first) -> this stage's `[P, D]`;
on the last one the loss, a scalar."""


def run_rows(model: nn.Module, stage: Stage, tokens: Sequence[int], compute: Compute, *, backward: bool) -> None:
    """Send all rows through the stages, and their gradients back. Every rank calls it, with the same rows along a column of stages.

    Args:
        model: this rank's stage of it, sharded.
        stage: which.
        tokens: P of each row, the tokens that this rank computes of it.
        compute: called once for each row, in order.
        backward: whether gradients are wanted; rows then go forward and back in turns (1F1B), as soon as there are as many as stages.
    """
    device = next(model.parameters()).device
    longest, width = max(tokens), model.config.get_text_config().hidden_size
    between = torch.empty(longest, width, dtype=stage.dtype, device="meta", requires_grad=backward)
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    one = _Stage(
        model,
        _Rows(stage, tokens, longest, compute),
        stage.index,
        stage.count,
        device,
        input_args=() if stage.first else (between,),
        output_args=(scalar if stage.last else between,),
        group=stage.group,
    )
    kind = Schedule1F1B if backward and len(tokens) >= stage.count else ScheduleGPipe
    schedule = kind(one, len(tokens), loss_fn=_loss if backward else None, scale_grads=False)
    schedule.step(target=torch.zeros(len(tokens)) if backward and stage.last else None, return_outputs=False)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output


class _Rows(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """Module that torch's stage calls, row by row in order. The model is not registered in it: its gradients are not torch's to handle."""

    def __init__(self, stage: Stage, tokens: Sequence[int], longest: int, compute: Compute) -> None:
        super().__init__()
        self._stage, self._tokens, self._longest, self._compute, self._next = stage, tokens, longest, compute, 0

    def forward(self, *received: Tensor) -> Tensor:
        """`[longest, D]` of the stage before -> `[longest, D]`, or the loss."""
        index, self._next = self._next, self._next + 1
        tokens = self._tokens[index]
        made = self._compute(index, received[0][:tokens] if received else None)
        return made if self._stage.last else pad(made, (0, 0, 0, self._longest - tokens))


class _Stage(PipelineStage):  # type: ignore[misc]
    """torch's stage, which tells FSDP before each backward pass what to reduce after it."""

    def __init__(self, model: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._model = model

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """See torch."""
        prepare_backward(self._model, last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
