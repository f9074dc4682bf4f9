"""Sums of gradients over micro-batches: in each rank's shard (`reduce`), or whole on every rank (`local`).

| | `reduce` | `local` |
|---|---|---|
| between micro-batches a rank holds, in float32 | its shard | the whole gradient |
| reduce-scatter over the shards | after every micro-batch | after the last |
| all-reduce over the replicas (HSDP) | after the last | after the last |

The sums are the same up to the rounding of their order.
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
"""Bytes of one number of a master or of its gradient: float32."""
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def attach_gradients(model: nn.Module, accumulation: GradientAccumulation, *, stays_gathered: bool = False) -> None:
    """Remember for `prepare_backward` where a model's gradients are summed, and whether its copies serve all micro-batches of a step."""
    object.__setattr__(model, _ATTRIBUTE, accumulation)
    object.__setattr__(model, _GATHERED, stays_gathered)


def prepare_backward(model: nn.Module, *, last: bool, layers: Sequence[nn.Module] | None = None) -> None:
    """Set what FSDP reduces after the next backward pass; a plain model has nothing to reduce.

    Args:
        model: as `shard` left it, or a plain one.
        last: whether this is the last micro-batch before the optimizer's step.
        layers: those that it is the last one for, beside the root's own parameters; None: all.
    """
    if not isinstance(model, FSDPModule):
        return
    if getattr(model, _GATHERED):
        model.set_reshard_after_backward(last)
    local = getattr(model, _ATTRIBUTE) == "local"
    for module in (model,) if layers is None else (model, *layers):
        change = module.set_requires_gradient_sync if local else module.set_requires_all_reduce
        change(last, recurse=layers is None or module is not model)


def check_memory(
    model: nn.Module, accumulation: GradientAccumulation, *, shards: int, offloaded: bool, available: int
) -> None:
    """Refuse `local` where the whole gradient has no place on the device.

    Args:
        model: divided by layers and experts, not by FSDP yet.
        accumulation: where gradients are summed.
        shards: ranks that share one copy of the parameters.
        offloaded: whether masters are in the host's memory.
        available: memory of the device, in bytes.

    Raises:
        RoleError: the gradient and this rank's masters are more than that.
    """
    if accumulation != "local":
        return
    gradient = _BYTES * sum(_count_elements(p) for p in model.parameters() if p.requires_grad)
    masters = 0 if offloaded else _BYTES * sum(map(_count_elements, model.parameters())) // shards
    if gradient + masters > available:
        raise RoleError(
            f"trainer.gradientAccumulation (local) keeps the whole gradient on every rank, {_show_gib(gradient)} beside "
            f"{_show_gib(masters)} of parameters, and the device has {_show_gib(available)}; set gradientAccumulation: reduce",
            exit_codes.CONFIGURATION,
        )


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of this machine's (at most its cgroup's limit)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or `max`
        return min(physical, int(_MEMORY_LIMIT.read_text()))
    return physical


def _count_elements(parameter: Tensor) -> int:
    """Number of elements of this rank's part."""
    return int((parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel())


def _show_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
