"""Pipeline parallelism, the division: a rank keeps the layers of its stages, the first also the embedding, the last norm and head.

What another rank has is replaced by a module without parameters, so that all names stay those of the whole model. A rank with several
stages has one model of all their layers; a pass of one of them goes past the others. An embedding that is the head as well is on both of
these stages: where two ranks have them, their gradients are added up before the update, which then changes both alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.config.division import stages_of_rank
from rlrun.config.models.parallel import PipelineSchedule
from rlrun.fit.stages import cut_layers
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTRIBUTE = "_rlrun_stage"
Value = TypeVar("Value")


class Elsewhere(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """A part of the model that another stage has. As a layer or a norm it hands its input on."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        """`[1, T, D]`, as it is."""
        return hidden


@dataclass(frozen=True)
class Stage:
    """Stage of a model that this rank has, or several."""

    index: int
    """Place of the rank among those that a row passes through."""
    count: int
    """Number of these ranks."""
    group: dist.ProcessGroup | None
    """The ranks that the same rows pass through, by their places; None: no rows do."""
    layers: Mapping[int, range]
    """Layers of each of its stages, by the stage's number."""
    total: int
    """Number of all stages."""
    schedule: PipelineSchedule
    tied: bool
    """True if the embedding is the head as well."""
    shapes: Mapping[str, torch.Size]
    """Shapes of the whole model's trained parameters and stored buffers: what a checkpoint holds."""
    dtype: torch.dtype
    """Number format of what goes from stage to stage."""
    stack: nn.ModuleList
    """The model's list of decoder layers."""

    @property
    def first(self) -> bool:
        """True if this rank has the embedding."""
        return 0 in self.layers

    @property
    def last(self) -> bool:
        """True if this rank has norm and head, and computes the loss."""
        return self.total - 1 in self.layers

    def computes_loss(self, number: int) -> bool:
        """True if the stage of this number is the last one."""
        return number == self.total - 1

    @property
    def head_place(self) -> int:
        """Place of the rank with the last stage."""
        return 0 if self.schedule == "ZBVZeroBubble" else self.count - 1


def stage_of(model: nn.Module) -> Stage | None:
    """Stage that a model is on this rank; None: it is whole."""
    found: Stage | None = getattr(model, _ATTRIBUTE, None)
    return found


def of_all_stages(model: nn.Module, value: Value) -> list[Value]:
    """One object of every rank that a row passes through, by their places, on all of them; of a model that is whole this one."""
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
    """Leave the stages of one rank, in place, before the model is divided further.

    Args:
        model: whole, on the CPU or on meta; `stage_check` has seen one of its kind.
        layers: its decoder layers, at least as many as stages.
        index: place of the rank.
        count: number of ranks that rows pass through.
        per_rank: stages of each.
        schedule: order of their passes; says which stages a rank has.
        group: ranks that rows pass through; None where none do.
        dtype: number format of what goes from stage to stage.

    Raises:
        RoleError: adapters leave a stage nothing to train.
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
    decoder = model.get_decoder()
    for number in range(len(layers)):
        if not any(number in run for run in stage.layers.values()):
            layers[number] = Elsewhere()
    if not stage.last:
        decoder.norm = Elsewhere()
    if not tied:
        if not stage.first:
            model.set_input_embeddings(Elsewhere())
        if not stage.last:
            model.set_output_embeddings(Elsewhere())
    elif not stage.first and not stage.last:
        model.set_input_embeddings(Elsewhere())
        model.set_output_embeddings(Elsewhere())
    object.__setattr__(model, _ATTRIBUTE, stage)


def last_stage(model: PreTrainedModel) -> AbstractContextManager[None]:
    """`one_stage` of the last stage; of a model that is whole, all of it."""
    stage = stage_of(model)
    return nullcontext() if stage is None else one_stage(model, stage.total - 1)


@contextmanager
def one_stage(model: PreTrainedModel, number: int) -> Iterator[None]:
    """Let a pass go through one of this rank's stages alone, inside of FSDP's forward method.

    What is passed by stays in FSDP's units, which hold modules themselves.
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
    """Refuse a stage without anything to train beside others that have: gradients pass through every stage."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    count = f"pp ({pp})" + ("" if len(runs) == pp else f" times stagesPerRank ({len(runs) // pp})")
    for run in runs:
        if not any(parameter.requires_grad for number in run for parameter in layers[number].parameters()):
            raise RoleError(
                f"trainer.parallelism.{count} makes a stage of the layers {run.start} to {run.stop - 1}, of which "
                "lora.targets trains nothing; lower pp, or train a part of every layer",
                exit_codes.CONFIGURATION,
            )


def _layer_cost(model: PreTrainedModel, layer: nn.Module) -> float:
    """Parameters of a layer's matrices that a token visits."""
    config = model.config
    experts = getattr(config, "num_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    matrices = {name: int(one.numel()) for name, one in layer.named_parameters() if one.ndim > 1}
    return sum(size * (share if "experts." in name else 1.0) for name, size in matrices.items())


def second_copy(model: nn.Module) -> Tensor | None:
    """The parameter of this rank that another rank has as well and that counts there: the last stage's tied embedding."""
    stage = stage_of(model)
    if stage is None or not (stage.tied and stage.last) or stage.first:
        return None
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def add_shared_gradients(model: nn.Module) -> None:
    """Give a tied embedding, on the first and the last stage, the sum of both stages' gradients: the same number on both."""
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
