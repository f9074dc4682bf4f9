"""A step of pipeline parallelism: delayed weight gradients, schedules, and rows (micro-batches) of different lengths.

Zero-bubble schedules compute the gradients of inputs first and delay the weight gradients of linear layers (Qi et al. 2023, Zero Bubble
Pipeline Parallelism, arXiv:2401.10241). torch's split of a backward pass traverses the graph, where it does not find weights gathered by
FSDP. Here a linear layer stores its input and the gradient of its output instead, which also works with recomputed and offloaded
activations. All other parameters (norms, embedding, head, experts) get their gradients immediately.

Schedules are torch's, for ranks with several stages, extended to any number of rows. torch's interleaved schedules require a multiple of
the number of ranks as number of rows. The schedule of the next multiple is used without the actions of missing rows, on which no other
action depends. torch adds the sends and receives.

Rows pass all stages in the order of the schedule. torch's stages send tensors of one shape. A row is computed at its own length; its
output is padded with zeros to the longest row of the step for the transfer and cut by the next stage, so that padding costs only
bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import linear, pad

from rlrun.config.layout_rules import stages_of_rank
from rlrun.config.models.parallel import PipelineSchedule
from rlrun.trainer.modeling.gradient_accumulation import prepare_backward
from rlrun.trainer.modeling.parallel.pipeline_stages import Stage

_ATTRIBUTE = "_rlrun_later_weights"
_Kept = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Weight, bias, input and gradient of the output."""


class LaterWeights:
    """Delayed weight gradients of one rank, as products: the input of a linear layer and the gradient of its output."""

    def __init__(self, model: nn.Module) -> None:
        """Create a store for the linear layers of `model` that `postpone_products` changes."""
        self._model = model
        self._waiting: list[_Kept] = []

    def store_product(self, product: _Kept) -> None:
        """Store the factors of a weight's gradient."""
        self._waiting.append(product)

    def take_products(self) -> Callable[[], None]:
        """Return a function that computes the products stored since the last call."""
        kept, self._waiting = self._waiting, []
        return partial(_add_products, self._model, kept)


def postpone_products(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Change the linear layers in `layers`, in place and before FSDP, to delay the products of their weight gradients."""
    later = LaterWeights(model)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                module.forward = partial(_forward_linear, module, later)
    object.__setattr__(model, _ATTRIBUTE, later)


def later_weights_of(model: nn.Module) -> LaterWeights | None:
    """Return the delayed products of a model, or None if its gradients are not delayed."""
    found: LaterWeights | None = getattr(model, _ATTRIBUTE, None)
    return found


def hold_gradients(model: nn.Module) -> None:
    """Disable the reduction of gradients until `reduce_gradients`."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)


def reduce_gradients(model: nn.Module) -> None:
    """Sum the accumulated gradients over the ranks once, like the backward pass of a last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
        model._get_fsdp_state()._root_post_backward_final_callback()


def _forward_linear(module: nn.Linear, later: LaterWeights, hidden: Tensor) -> Tensor:
    return _Linear.apply(hidden, module.weight, module.bias, later)


class _LinearContext(Protocol):
    """Context of `_Linear` in the autograd graph."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor]
    parameters: tuple[Tensor, Tensor | None]
    later: LaterWeights

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


class _Linear(torch.autograd.Function):
    """Linear layer whose backward pass computes only the gradient of the input."""

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor | None, LaterWeights], Tensor]]

    @staticmethod
    def forward(
        ctx: _LinearContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, later: LaterWeights
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        # The products are added to `grad` of the parameters themselves; hooks may replace saved tensors.
        ctx.parameters, ctx.later = (weight, bias), later
        return linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: _LinearContext, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.later.store_product((*ctx.parameters, hidden.detach(), gradient.detach()))
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None, None


@torch.no_grad()
def _add_products(model: nn.Module, kept: list[_Kept]) -> None:
    """Add the products to the gradients of the gathered parameters. FSDP does not reduce these gradients yet (`hold_gradients`)."""
    while kept:
        weight, bias, hidden, gradient = kept.pop()
        columns = gradient.flatten(0, -2)
        _accumulate_gradient(weight, columns.T @ hidden.flatten(0, -2))
        if bias is not None and bias.requires_grad:
            _accumulate_gradient(bias, columns.sum(0))
    if isinstance(model, FSDPModule):
        _sum_in_float32(model)


def _accumulate_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _sum_in_float32(model: nn.Module) -> None:
    """Add gradients in the compute dtype to FSDP's float32 sums, as FSDP does after a backward pass. Sums stay float32."""
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


Action = Any
"""Action of torch: a stage, a computation and a row."""
_KINDS = {
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Order:
    """Actions of all ranks in one step."""

    computed: Mapping[int, Sequence[Action]]
    """Computations of each rank."""
    sent: Mapping[int, Sequence[Action]]
    """Computations, sends and receives of each rank."""
    places: Mapping[int, int]
    """Rank of each stage."""


@lru_cache(maxsize=64)
def schedule_actions(
    schedule: PipelineSchedule, ranks: int, per_rank: int, rows: int, *, backward: bool = True
) -> Order:
    """Return the actions of one step.

    Args:
        schedule: schedule with several stages per rank.
        ranks: number of ranks in the pipeline.
        per_rank: number of stages per rank.
        rows: number of micro-batches, at least 1.
        backward: compute gradients; otherwise each rank runs all rows through its stages in order.
    """
    # Folded: rows pass through the ranks and back, so that each rank has two stages (a V).
    folded = schedule == "ZBVZeroBubble"
    stages = {rank: stages_of_rank(rank, ranks, per_rank, folded=folded) for rank in range(ranks)}
    places = {stage: rank for rank, own in stages.items() for stage in own}
    # torch's schedules interleave forward with backward passes. Without gradients all rows can go
    # through each stage in order.
    if not backward:
        forward = torch_schedules.FORWARD
        passes = {
            rank: [torch_schedules._Action(stage, forward, row) for stage in own for row in range(rows)]
            for rank, own in stages.items()
        }
        # torch removes the actions from the lists of its argument, so it gets copies.
        sent = torch_schedules._add_send_recv(
            {rank: list(own) for rank, own in passes.items()}, lambda stage: places[stage], ranks * per_rank
        )
        return Order(passes, sent, places)
    # torch's classes create the order of actions from these four attributes only, so no stage with
    # tensors is needed.
    stand_ins = [
        SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=None)
        for _ in range(per_rank)
    ]
    # The next multiple of the number of ranks; the actions of missing rows are removed.
    whole = _KINDS[schedule](stand_ins, -(-rows // ranks) * ranks)
    computed = {
        rank: [action for action in actions if action is not None and action.microbatch_index < rows]
        for rank, actions in whole.pipeline_order.items()
    }
    # Set after the order was made for the multiple of the ranks: sends and receives are added only
    # for the rows that exist.
    whole._n_microbatches = rows
    whole._prepare_schedule_with_comms({rank: list(actions) for rank, actions in computed.items()})
    return Order(computed, whole.pipeline_order_with_comms, places)


Compute = Callable[[int, int, Tensor | None], Tensor]
"""Function that computes one row in one stage: its arguments are the numbers of stage and row and the previous stage's output `[P, D]`
(None on the first); it returns this stage's output `[P, D]`, or the scalar loss on the last stage.
"""


def run_rows(model: nn.Module, stage: Stage, tokens: Sequence[int], compute: Compute, *, backward: bool) -> None:
    """Run all rows through the stages, and their gradients backward. All ranks of a pipeline (`stage.group`) call it together,
    with the same rows.

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
        # torch's 1F1B refuses fewer rows than stages.
        kind = Schedule1F1B if backward and len(tokens) >= stage.count else ScheduleGPipe
        schedule = kind(own[0], len(tokens), **options)
    else:
        actions = schedule_actions(stage.schedule, stage.count, len(own), len(tokens), backward=backward)
        schedule = _Several(own, len(tokens), actions, **options)
    later = later_weights_of(model) if backward else None
    # Products are delayed past torch's last backward call, so FSDP must not reduce the gradients
    # before them.
    if later is not None:
        hold_gradients(model)
    # torch requires a target for the loss; `_stage_loss` does not use it.
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
        dw_builder=None if later is None else later.take_products,
    )


def _stage_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss."""
    return output


class _Several(_PipelineScheduleRuntime):  # type: ignore[misc]  # torch is not type-checked
    """torch's executor of pipeline actions, for ranks with several stages."""

    def __init__(self, stages: Sequence[_Stage], rows: int, actions: Order, **options: Any) -> None:
        super().__init__(list(stages), rows, **options)
        # torch assumes that stage i is on rank i modulo the ranks; folded schedules place stages in
        # a V.
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
        """Configure FSDP's reductions, then run torch's method."""
        # With delayed products the reduction is switched for the whole step (`hold_gradients`).
        if self.dw_builder is None:
            layers = [self._own.stack[index] for index in self._own.layers[self.stage_index]]
            prepare_backward(self._model, last=last_backward, layers=layers if len(self._own.layers) > 1 else None)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
