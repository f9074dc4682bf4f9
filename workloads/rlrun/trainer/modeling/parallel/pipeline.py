"""Pipeline parallelism, a step: rows of different lengths pass all stages in the order of torch's schedules.

torch's stages send tensors of one shape. A row is computed at its own length; its output is padded with zeros to the longest row of the
step for the transfer and cut by the next stage, so that padding costs only bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import pad

from rlrun.trainer.modeling.gradient_accumulation import prepare_backward
from rlrun.trainer.modeling.parallel.later_weights import hold_gradients, later_weights_of, reduce_gradients
from rlrun.trainer.modeling.parallel.schedules import Order, schedule_actions
from rlrun.trainer.modeling.parallel.stages import Stage

Compute = Callable[[int, int, Tensor | None], Tensor]
"""Function that computes one row in one stage: its arguments are the numbers of stage and row and the previous stage's output `[P, D]`
(None on the first); it returns this stage's output `[P, D]`, or the scalar loss on the last stage.
"""


def run_rows(model: nn.Module, stage: Stage, tokens: Sequence[int], compute: Compute, *, backward: bool) -> None:
    """Run all rows through the stages, and their gradients backward. All ranks call it together, with the same rows on all stages of a
    column.

    Args:
        model: sharded stages of this rank.
        stage: description of the stages.
        tokens: number P of tokens of each row that this rank computes.
        compute: function called for each row and each stage of this rank; rows of a stage in order.
        backward: compute gradients too, in the order of the schedule.
    """
    own = [_torch_stage(model, stage, number, tokens, compute, backward=backward) for number in stage.layers]
    options: dict[str, Any] = {"loss_fn": _stage_loss if backward else None, "scale_grads": False}
    if len(own) == 1:
        kind = Schedule1F1B if backward and len(tokens) >= stage.count else ScheduleGPipe
        schedule = kind(own[0], len(tokens), **options)
    else:
        actions = schedule_actions(stage.schedule, stage.count, len(own), len(tokens), backward=backward)
        schedule = _Several(own, len(tokens), actions, **options)
    later = later_weights_of(model) if backward else None
    if later is not None:
        hold_gradients(model)
    schedule.step(target=torch.zeros(len(tokens)) if backward and stage.last else None, return_outputs=False)
    if later is not None:
        reduce_gradients(model)


def _torch_stage(
    model: nn.Module, stage: Stage, number: int, tokens: Sequence[int], compute: Compute, *, backward: bool
) -> _Stage:
    """Create torch's object for one of this rank's stages."""
    device = next(model.parameters()).device
    longest, width = max(tokens), model.config.get_text_config().hidden_size
    between = torch.empty(longest, width, dtype=stage.dtype, device="meta", requires_grad=backward)
    scalar = torch.empty((), dtype=torch.float32, device="meta")
    later = later_weights_of(model)
    return _Stage(
        model,
        stage,
        _Rows(stage, number, tokens, longest, compute),
        number,
        stage.total,
        device,
        input_args=() if number == 0 else (between,),
        output_args=(scalar if stage.computes_loss(number) else between,),
        group=stage.group,
        dw_builder=None if later is None else later.take,
    )


def _stage_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


class _Several(_PipelineScheduleRuntime):  # type: ignore[misc]  # torch is not type-checked
    """torch's executor of pipeline actions, for ranks with several stages."""

    def __init__(self, stages: Sequence[_Stage], rows: int, actions: Order, **options: Any) -> None:
        super().__init__(list(stages), rows, **options)
        self.stage_index_to_group_rank = dict(actions.places)
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = actions.sent


class _Rows(nn.Module):  # type: ignore[misc]
    """Module that torch's stage calls for each row in order. The model is not a submodule, so torch does not process its gradients."""

    def __init__(self, stage: Stage, number: int, tokens: Sequence[int], longest: int, compute: Compute) -> None:
        super().__init__()
        self._last, self._number = stage.computes_loss(number), number
        self._tokens, self._longest, self._compute, self._next = tokens, longest, compute, 0

    def forward(self, *received: Tensor) -> Tensor:
        """Compute the output `[longest, D]`, or the loss, from the previous stage's output `[longest, D]`."""
        index, self._next = self._next, self._next + 1
        tokens = self._tokens[index]
        made = self._compute(self._number, index, received[0][:tokens] if received else None)
        return made if self._last else pad(made, (0, 0, 0, self._longest - tokens))


class _Stage(PipelineStage):  # type: ignore[misc]
    """torch's stage, extended to configure FSDP's reductions before each backward pass."""

    def __init__(self, model: nn.Module, stage: Stage, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._model, self._own = model, stage

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Override of torch's method."""
        if self.dw_builder is None:
            layers = [self._own.stack[index] for index in self._own.layers[self.stage_index]]
            prepare_backward(self._model, last=last_backward, layers=layers if len(self._own.layers) > 1 else None)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
