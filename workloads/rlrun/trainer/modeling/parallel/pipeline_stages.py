"""Pipeline parallelism, the division: a rank keeps the layers of its stages; the first stage has the embedding, the last has norm and head.

Other parts are replaced with modules without parameters, so that all names equal those of the whole model. A rank with several stages has
one model with all their layers; a pass of one stage skips the others. A tied embedding is on the first and the last stage. If these are
on two ranks, its gradients are summed before the update, which then is the same on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.config.layout_rules import stages_of_rank
from rlrun.config.models.parallel import PipelineSchedule
from rlrun.fit.layout import cut_layers
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.encoders import encoder_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ATTRIBUTE = "_rlrun_stage"
Value = TypeVar("Value")


class Elsewhere(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """Placeholder of a part in another stage, which returns its input."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        """Return the input `[1, T, D]` unchanged."""
        return hidden


@dataclass(frozen=True)
class Stage:
    """Stages of this rank."""

    index: int
    """Position of the rank in the pipeline."""
    count: int
    """Number of ranks in the pipeline."""
    group: dist.ProcessGroup | None
    """Ranks with the same rows, in the order of the pipeline; None if no rows are computed."""
    layers: Mapping[int, range]
    """Layers of each stage of this rank, by number of the stage."""
    total: int
    """Total number of stages."""
    schedule: PipelineSchedule
    tied: bool
    """Whether embedding and head are tied."""
    shapes: Mapping[str, torch.Size]
    """Shapes of the whole model's trained parameters and stored buffers, which a checkpoint contains."""
    dtype: torch.dtype
    """Number format of hidden states between stages."""
    stack: nn.ModuleList
    """List of the model's decoder layers."""

    @property
    def first(self) -> bool:
        """Whether this rank has the embedding."""
        return 0 in self.layers

    @property
    def last(self) -> bool:
        """Whether this rank has norm and head, and computes the loss."""
        return self.total - 1 in self.layers

    def computes_loss(self, number: int) -> bool:
        """Return whether a stage is the last one."""
        return number == self.total - 1

    @property
    def head_place(self) -> int:
        """Position in the pipeline of the rank with the last stage."""
        return 0 if self.schedule == "ZBVZeroBubble" else self.count - 1


def stage_of(model: nn.Module) -> Stage | None:
    """Return the stages of a model on this rank, or None for a whole model."""
    found: Stage | None = getattr(model, _ATTRIBUTE, None)
    return found


def of_all_stages(model: nn.Module, value: Value) -> list[Value]:
    """Gather one object from every rank of the pipeline, in its order; return only this rank's object for a whole model."""
    stage = stage_of(model)
    if stage is None:
        return [value]
    found: list[Any] = [None] * stage.count
    dist.all_gather_object(found, value, group=stage.group)
    return found


def keep_stage(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    index: int,
    count: int,
    *,
    per_rank: int = 1,
    schedule: PipelineSchedule = "1F1B",
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Reduce a model to the stages of one rank, in place, before the model is divided further.

    Args:
        model: whole model, on the CPU or on meta, whose architecture `stage_check` accepts.
        layers: decoder layers of the model, at least as many as stages.
        index, count: position of the rank, and number of ranks in the pipeline.
        per_rank: number of stages per rank.
        schedule: pipeline schedule, which defines the stages of a rank.
        group: ranks of the pipeline, or None if no rows are computed.
        dtype: number format of hidden states between stages.

    Raises:
        RoleError: a stage has no trained parameter because of the adapters' targets.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    costs = [_layer_cost(model, layer) for layer in layers]
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    runs = cut_layers(costs, head.weight.numel(), count * per_rank)
    numbers = stages_of_rank(index, count, per_rank, folded=schedule == "ZBVZeroBubble")
    _check_trained(model, layers, runs, count)
    stage = Stage(
        index,
        count,
        group,
        {number: runs[number] for number in numbers},
        len(runs),
        schedule,
        tied,
        {name: tensor.shape for name, tensor in model.state_dict().items() if name not in frozen},
        dtype,
        layers,
    )
    _replace_other_stages(model, layers, stage)
    object.__setattr__(model, _ATTRIBUTE, stage)


def _replace_other_stages(model: PreTrainedModel, layers: nn.ModuleList, stage: Stage) -> None:
    """Replace layers, norm, embedding and head of other stages. A tied embedding stays on the first and the last stage. Encoders are only
    on the first one, which publishes them.
    """
    decoder = model.get_decoder()
    for number in range(len(layers)):
        if not any(number in run for run in stage.layers.values()):
            layers[number] = Elsewhere()
    if not stage.first:
        for name in encoder_parts(model):
            model.set_submodule(name, Elsewhere())
    if not stage.last:
        decoder.norm = Elsewhere()
    if not stage.tied:
        if not stage.first:
            model.set_input_embeddings(Elsewhere())
        if not stage.last:
            model.set_output_embeddings(Elsewhere())
    elif not stage.first and not stage.last:
        model.set_input_embeddings(Elsewhere())
        model.set_output_embeddings(Elsewhere())


def last_stage(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return `one_stage` of the last stage, or an empty context for a whole model."""
    stage = stage_of(model)
    return nullcontext() if stage is None else one_stage(model, stage.total - 1)


@contextmanager
def one_stage(model: PreTrainedModel, number: int) -> Iterator[None]:
    """Restrict forward passes to one of this rank's stages, inside of FSDP's forward method.

    Skipped layers stay in FSDP's units, which reference the modules directly.
    """
    stage = stage_of(model)
    if stage is None or len(stage.layers) == 1:
        yield
        return
    left_out: dict[int, nn.Module] = {}
    decoder, layers = model.get_decoder(), stage.stack
    for other, run in stage.layers.items():
        if other != number:
            left_out |= {index: layers[index] for index in run}
    norm = decoder.norm
    try:
        for index in left_out:
            layers[index] = Elsewhere()
        if not stage.computes_loss(number):
            decoder.norm = Elsewhere()
        yield
    finally:
        for index, layer in left_out.items():
            layers[index] = layer
        decoder.norm = norm


def _check_trained(model: nn.Module, layers: nn.ModuleList, runs: Sequence[range], pp: int) -> None:
    """Raise an error for a stage without trained parameters, because gradients must pass through every stage."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    count = f"pp ({pp})" + ("" if len(runs) == pp else f" times stagesPerRank ({len(runs) // pp})")
    for run in runs:
        if not any(parameter.requires_grad for number in run for parameter in layers[number].parameters()):
            raise RoleError(
                f"trainer.parallelism.{count} creates a stage of the layers {run.start} to {run.stop - 1}, which have no "
                "layer of lora.targets; lower pp, or add targets in every layer",
                exit_codes.CONFIGURATION,
            )


def _layer_cost(model: PreTrainedModel, layer: nn.Module) -> float:
    """Return the number of matrix parameters of a layer that a token uses."""
    config = model.config
    experts = getattr(config, "num_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    matrices = {name: int(one.numel()) for name, one in layer.named_parameters() if one.ndim > 1}
    return sum(size * (share if "experts." in name else 1.0) for name, size in matrices.items())


def second_copy(model: nn.Module) -> Tensor | None:
    """Return the parameter of this rank that counts on another rank: the tied embedding of the last stage, or None."""
    stage = stage_of(model)
    if stage is None or not (stage.tied and stage.last) or stage.first:
        return None
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def add_shared_gradients(model: nn.Module) -> None:
    """Sum the gradients of a tied embedding over the first and the last stage; both get the same result."""
    stage = stage_of(model)
    if stage is None or not stage.tied or stage.first == stage.last:
        return
    gradient = model.get_input_embeddings().weight.grad
    if gradient is None:
        return
    mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    other, peer = torch.empty_like(mine), stage.head_place if stage.first else 0
    operations = [
        dist.P2POp(dist.isend, mine.clone(), group=stage.group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=stage.group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine.add_(other)
