"""Pipeline parallelism, the division: a rank keeps the layers of its stage, the first also the embedding, the last norm and head.

What another stage has is replaced by a module without parameters, so that all names stay those of the whole model. An embedding that is
the head as well is on both of these stages: their gradients are added up before the update, which then changes both alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.fit.stages import cut
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
    """Stage of a model that this rank has."""

    index: int
    count: int
    group: dist.ProcessGroup | None
    """Ranks of all stages that have the same rows, in order of the stages; None: no rows pass through."""
    layers: range
    tied: bool
    """True if the embedding is the head as well."""
    shapes: Mapping[str, torch.Size]
    """Shapes of the whole model's trained parameters and stored buffers: what a checkpoint holds."""
    dtype: torch.dtype
    """Number format of what goes from stage to stage."""

    @property
    def first(self) -> bool:
        """True if this stage has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """True if this stage has norm and head, and computes the loss."""
        return self.index == self.count - 1


def stage_of(model: nn.Module) -> Stage | None:
    """Stage that a model is on this rank; None: it is whole."""
    found: Stage | None = getattr(model, _ATTRIBUTE, None)
    return found


def of_all_stages(model: nn.Module, value: Value) -> list[Value]:
    """One object of every stage, in their order, on the ranks of all; of a model that is whole this one."""
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
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Leave one stage of the model, in place, before it is divided further.

    Args:
        model: whole, on the CPU or on meta; `stage_check` has seen one of its kind.
        layers: its decoder layers, at least as many as stages.
        index: of the stage.
        count: number of stages.
        group: ranks that rows pass through; None where none do.
        dtype: number format of what goes from stage to stage.

    Raises:
        RoleError: adapters leave a stage nothing to train.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    costs = [_cost(model, layer) for layer in layers]
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    runs = cut(costs, head.weight.numel(), count)
    _check_trained(model, layers, runs)
    stage = Stage(
        index,
        count,
        group,
        runs[index],
        tied,
        {name: tensor.shape for name, tensor in model.state_dict().items() if name not in frozen},
        dtype,
    )
    decoder = model.get_decoder()
    for number in range(len(layers)):
        if number not in stage.layers:
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


def _check_trained(model: nn.Module, layers: nn.ModuleList, runs: Sequence[range]) -> None:
    """Refuse a stage without anything to train beside others that have: gradients pass through every stage."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    for run in runs:
        if not any(parameter.requires_grad for number in run for parameter in layers[number].parameters()):
            raise RoleError(
                f"trainer.parallelism.pp ({len(runs)}) makes a stage of the layers {run.start} to {run.stop - 1}, of which "
                "lora.targets trains nothing; lower pp, or train a part of every layer",
                exit_codes.CONFIGURATION,
            )


def _cost(model: PreTrainedModel, layer: nn.Module) -> float:
    """Parameters of a layer's matrices that a token visits."""
    config = model.config
    experts = getattr(config, "num_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    matrices = {name: int(one.numel()) for name, one in layer.named_parameters() if one.ndim > 1}
    return sum(size * (share if "experts." in name else 1.0) for name, size in matrices.items())


def second_copy(model: nn.Module) -> Tensor | None:
    """The parameter of this stage that another stage has as well and that counts there: the last stage's tied embedding."""
    stage = stage_of(model)
    if stage is None or not (stage.tied and stage.last):
        return None
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def add_shared_gradients(model: nn.Module) -> None:
    """Give a tied embedding, on the first and the last stage, the sum of both stages' gradients: the same number on both."""
    stage = stage_of(model)
    if stage is None or not stage.tied or not (stage.first or stage.last):
        return
    gradient = model.get_input_embeddings().weight.grad
    if gradient is None:
        return
    mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    other, peer = torch.empty_like(mine), stage.count - 1 if stage.first else 0
    operations = [
        dist.P2POp(dist.isend, mine.clone(), group=stage.group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=stage.group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine.add_(other)
