"""Accumulation of gradients over micro-batches: in each rank's shard (`reduce`), or complete on every rank (`local`).

| | `reduce` | `local` |
|---|---|---|
| float32 gradient on a rank between micro-batches | its shard | complete |
| reduce-scatter over the shards | after every micro-batch | after the last |
| all-reduce over the replicas (HSDP) | after the last | after the last |

The sums are equal, except for rounding by the order of additions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlrun.config.models.parallel import GradientAccumulation
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

_ATTRIBUTE, _GATHERED = "_rlrun_gradient_accumulation", "_rlrun_stays_gathered"
_BYTES = 4
"""Bytes of one element of a float32 parameter or gradient."""
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def attach_gradients(model: nn.Module, accumulation: GradientAccumulation, *, stays_gathered: bool = False) -> None:
    """Store the options for `prepare_backward` at the model: the accumulation, and whether gathered parameters stay for all micro-batches
    of a step.
    """
    object.__setattr__(model, _ATTRIBUTE, accumulation)
    object.__setattr__(model, _GATHERED, stays_gathered)


def prepare_backward(model: nn.Module, *, last: bool, layers: Sequence[nn.Module] | None = None) -> None:
    """Configure the reductions of FSDP after the next backward pass; no effect for a model without FSDP.

    Args:
        model: sharded or plain model.
        last: true for the last micro-batch before the optimizer's step.
        layers: layers to configure in addition to the root's own parameters. Default: all.
    """
    if not isinstance(model, FSDPModule):
        return
    # Parameters that stay gathered over a step's rows are not gathered again for each row; after
    # the last row they are freed for the optimizer.
    if getattr(model, _GATHERED):
        model.set_reshard_after_backward(last)
    local = getattr(model, _ATTRIBUTE) == "local"
    # Without `local` only the last row reduces over the copies of the model, but each row reduces
    # over the shards: a complete gradient on each rank may not fit into memory.
    for module in (model,) if layers is None else (model, *layers):
        change = module.set_requires_gradient_sync if local else module.set_requires_all_reduce
        change(last, recurse=layers is None or module is not model)


def check_memory(
    model: nn.Module, accumulation: GradientAccumulation, *, shards: int, offloaded: bool, available: int
) -> None:
    """Raise an error if `local` accumulation does not fit into the device's memory.

    Args:
        model: model divided by layers and experts, before FSDP.
        accumulation: configured accumulation.
        shards: number of ranks that shard one copy of the parameters.
        offloaded: true if float32 parameters are in host memory.
        available: memory of the device, in bytes.

    Raises:
        RoleError: the complete gradient and this rank's parameters exceed the memory.
    """
    if accumulation != "local":
        return
    gradient = _BYTES * sum(_count_elements(p) for p in model.parameters() if p.requires_grad)
    masters = 0 if offloaded else _BYTES * sum(map(_count_elements, model.parameters())) // shards
    if gradient + masters > available:
        raise RoleError(
            f"trainer.gradientAccumulation (local) needs {_show_gib(gradient)} for the complete gradient on every rank and "
            f"{_show_gib(masters)} for parameters, but the device has {_show_gib(available)}; set gradientAccumulation: reduce",
            exit_codes.CONFIGURATION,
        )


def device_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or of this machine's memory (at most the cgroup's limit)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or `max`
        return min(physical, int(_MEMORY_LIMIT.read_text()))
    return physical


def _count_elements(parameter: Tensor) -> int:
    """Return the number of elements of this rank's part."""
    return int((parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel())


def _show_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
