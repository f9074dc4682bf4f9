"""Ways to divide a linear layer over tensor ranks, each also for one with an adapter (`rlrun.trainer.modeling.lora`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import linear

PARAMETERS = ("lora_A", "lora_B")
"""Parameters of a linear layer with an adapter."""


class Columns(ColwiseParallel):  # type: ignore[misc]  # torch is not type-checked
    """Division by columns, also of a layer with an adapter: B is divided by rows as the weight is, A is whole on every rank."""

    def __init__(self, *, copied: bool = False) -> None:
        """Keep whether results are copied: autograd takes no change in place of what a DTensor holds."""
        super().__init__()
        self.copied = copied

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied = super()._apply(module, device_mesh)
        if self.copied:
            applied.register_forward_hook(lambda module, inputs, output: output.clone())
        return applied

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        adapter = _take_adapter(module)
        super()._partition_linear_fn(name, module, device_mesh)
        _put_adapter(module, adapter, device_mesh, lora_A=Replicate(), lora_B=Shard(0))


class Rows(RowwiseParallel):  # type: ignore[misc]
    """Division by rows, also of a layer with an adapter: A is divided by columns as the weight is, B is whole on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        adapter = _take_adapter(module)
        super()._partition_linear_fn(name, module, device_mesh)
        _put_adapter(module, adapter, device_mesh, lora_A=Shard(1), lora_B=Replicate())


class Joined(ParallelStyle):  # type: ignore[misc]
    """Division by columns of a layer whose outputs are several parts end to end: each rank computes its share of every part.

    The parameters stay what they are in files: whole rows in their order, of which each rank holds one run. Those that a rank computes
    with are another choice of rows, so that they are gathered for each use, as FSDP gathers them over its ranks.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """Keep the outputs of each part."""
        super().__init__()
        self.widths = tuple(widths)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if sum(self.widths) != module.out_features:
            raise ValueError(f"parts of {self.widths} outputs in a layer of {module.out_features}")
        for name, parameter in list(module.named_parameters()):
            whole = name == "lora_A"
            divided = distribute_tensor(
                parameter.detach(), device_mesh, [Replicate() if whole else Shard(0)], src_data_rank=self.src_data_rank
            )
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        shares: list[tuple[int, int]] = []
        start = 0
        for width in self.widths:
            shares.append((start + rank * width // size, start + (rank + 1) * width // size))
            start += width
        module.forward = partial(_joined_forward, module, shares, device_mesh)
        return module


def _joined_forward(module: Any, shares: Sequence[tuple[int, int]], mesh: DeviceMesh, input: Tensor) -> Tensor:
    """`[..., in]` of all ranks -> `[..., out / ranks]`."""

    def own(parameter: DTensor) -> Tensor:
        whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return torch.cat([whole[first:last] for first, last in shares])

    copied = DTensor.from_local(input, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    bias = None if module.bias is None else own(module.bias)
    output = linear(copied, own(module.weight), bias)
    if not hasattr(module, "lora_A"):
        return output
    low = linear(copied, module.lora_A.to_local(grad_placements=[Partial()]))
    return output + linear(low, own(module.lora_B)) * module.scaling


def _take_adapter(module: nn.Module) -> dict[str, nn.Parameter]:
    names = [name for name in module._parameters if name in PARAMETERS]
    return {name: module._parameters.pop(name) for name in names}


def _put_adapter(
    module: nn.Module, adapter: dict[str, nn.Parameter], mesh: DeviceMesh, **placements: Placement
) -> None:
    for name, parameter in adapter.items():  # its values are set later, from the seed
        divided = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
