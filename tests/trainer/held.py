"""Gradients that a rank holds between micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from rlrun.trainer.modeling.shard import decoder_layers, fsdp_modules, local_part


@dataclass
class Held:
    """Bytes of one rank."""

    shard: int
    """Bytes of this rank's trained parameters, in float32."""
    whole: int
    """Bytes of all trained parameters."""
    gradients: list[int]
    """Gradient bytes before each micro-batch."""
    final: list[int]
    """Number of parameters whose gradient already sums all replicas, before each micro-batch."""


def gradient_bytes(model: nn.Module) -> int:
    """Return the memory of all possible locations of gradient sums, counting each storage once."""
    found: list[Tensor | None] = []
    for unit in fsdp_modules(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            found.append(group._partial_reduce_output)
            for parameter in group.fsdp_params:
                found.append(parameter.sharded_param.grad)
                found.append(parameter.unsharded_accumulated_grad)
                found.append(getattr(getattr(parameter, "_unsharded_param", None), "grad", None))
    storages = [local_part(tensor).untyped_storage() for tensor in found if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def final_gradients(model: nn.Module) -> int:
    """Return the number of parameters whose gradient FSDP has already reduced."""
    groups = [group for unit in fsdp_modules(model) for group in unit._get_fsdp_state()._fsdp_param_groups]
    return sum(parameter.sharded_param.grad is not None for group in groups for parameter in group.fsdp_params)


@contextmanager
def watched(model: nn.Module) -> Iterator[Held]:
    """Measure before each forward pass in the block."""
    trained = [p for p in model.parameters() if p.requires_grad]
    held = Held(sum(4 * local_part(p).numel() for p in trained), sum(4 * p.numel() for p in trained), [], [])

    def measure(*_: object) -> None:
        held.gradients.append(gradient_bytes(model))
        held.final.append(final_gradients(model))

    hook = decoder_layers(model)[0].register_forward_pre_hook(measure)
    yield held
    hook.remove()
