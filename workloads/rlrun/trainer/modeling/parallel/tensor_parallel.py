"""Tensor parallelism (arXiv:1909.08053): each rank has a part of the heads and of the feed-forward's columns.

The styles of divided linear layers support adapters (`rlrun.trainer.modeling.lora`).

The table of families (`rlrun.config.families`) defines the division of each module. Outside of the layers nothing is divided by columns:
FSDP also shards embedding, last norm and head over the tensor ranks, and each rank computes a part of the positions there
(`sharded_rows`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import linear

from rlrun.config.families import Family, Kind, Width, explain_undivided, find_family
from rlrun.config.layout_rules import tensor_problem
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.parallel.collectives import copy_to, scale_gradient
from rlrun.trainer.modeling.parallel.pipeline_stages import Elsewhere

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PARAMETERS = ("lora_A", "lora_B")
"""Parameters of an adapter in a linear layer."""


class Columns(ColwiseParallel):  # type: ignore[misc]  # torch is not type-checked
    """Division by columns; with an adapter B is divided by rows like the weight, and A is complete on every rank."""

    def __init__(self, *, copied: bool = False) -> None:
        """Create the style. `copied`: copy outputs, because autograd does not allow in-place changes of a DTensor's local tensor."""
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
    """Division by rows; with an adapter A is divided by columns like the weight, and B is complete on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        adapter = _take_adapter(module)
        super()._partition_linear_fn(name, module, device_mesh)
        _put_adapter(module, adapter, device_mesh, lora_A=Shard(1), lora_B=Replicate())


class Joined(ParallelStyle):  # type: ignore[misc]
    """Division by columns of a layer with several concatenated outputs: each rank computes its share of every output.

    The parameters keep the order of rows in files, and each rank has one contiguous range. A rank computes with other rows, so they are
    gathered for each pass, like FSDP gathers over its ranks, and not kept.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """Create the style from the number of outputs of each part."""
        super().__init__()
        self.widths = tuple(widths)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if sum(self.widths) != module.out_features:
            raise ValueError(f"parts of {self.widths} outputs do not match a layer with {module.out_features} outputs")
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
        module.forward = partial(_joined_forward, module, shares, device_mesh.get_group())
        return module


def _joined_forward(module: Any, shares: Sequence[tuple[int, int]], group: dist.ProcessGroup, input: Tensor) -> Tensor:
    """Compute `[..., out / ranks]` from the input `[..., in]`, which is equal on all ranks."""
    bias = None if module.bias is None else module.bias.to_local()
    output = _JoinedLinear.apply(input, module.weight.to_local(), bias, shares, group)
    if not hasattr(module, "lora_A"):
        return output
    low = linear(copy_to(input, group), module.lora_A.to_local(grad_placements=[Partial()]))
    update = _JoinedLinear.apply(low, module.lora_B.to_local(), None, shares, group, False)
    return output + update * module.scaling


class _JoinedContext(Protocol):
    """Context of `_JoinedLinear` in the autograd graph."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor]
    shares: Sequence[tuple[int, int]]
    group: dist.ProcessGroup
    shared_input: bool

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors for the backward pass."""


class _JoinedLinear(torch.autograd.Function):
    """Linear layer with selected rows of a matrix that is sharded by contiguous rows; the rows are gathered again for backward."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(
        ctx: _JoinedContext,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shares: Sequence[tuple[int, int]],
        group: dist.ProcessGroup,
        shared_input: bool = True,
    ) -> Tensor:
        """Compute the layer. `shared_input`: the ranks have the same input, so its gradients are summed over the ranks."""
        ctx.save_for_backward(input, weight)
        ctx.shares, ctx.group, ctx.shared_input = shares, group, shared_input
        own_bias = None if bias is None else _own_rows(bias, shares, group)
        output: Tensor = linear(input, _own_rows(weight, shares, group), own_bias)
        return output

    @staticmethod
    def backward(ctx: _JoinedContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        d_input = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_input = (gradient @ _own_rows(weight, ctx.shares, ctx.group)).view(input.shape)
            if ctx.shared_input:
                dist.all_reduce(d_input, group=ctx.group)
        if ctx.needs_input_grad[1]:
            d_weight = _given_back(gradient.T @ input.flatten(0, -2), ctx.shares, ctx.group)
        if ctx.needs_input_grad[2]:
            d_bias = _given_back(gradient.sum(0), ctx.shares, ctx.group)
        return d_input, d_weight, d_bias, None, None, None


def _own_rows(part: Tensor, shares: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> Tensor:
    """Gather the rows with which this rank computes."""
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    dist.all_gather_single(whole, part.contiguous(), group=group)
    return torch.cat([whole[first:last] for first, last in shares])


def _given_back(gradient: Tensor, shares: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> Tensor:
    """Return the gradient of this rank's contiguous rows; the gradient of each row comes from one rank."""
    ranks = dist.get_world_size(group)
    whole = gradient.new_zeros(gradient.shape[0] * ranks, *gradient.shape[1:])
    for (first, last), rows in zip(shares, gradient.split([last - first for first, last in shares]), strict=True):
        whole[first:last] = rows
    run = gradient.new_empty(gradient.shape)
    dist.reduce_scatter_single(run, whole, group=group)
    return run


def _take_adapter(module: nn.Module) -> dict[str, nn.Parameter]:
    names = [name for name in module._parameters if name in PARAMETERS]
    return {name: module._parameters.pop(name) for name in names}


def _put_adapter(
    module: nn.Module, adapter: dict[str, nn.Parameter], mesh: DeviceMesh, **placements: Placement
) -> None:
    for name, parameter in adapter.items():  # values are initialized later from the seed
        divided = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def check_family(model: PreTrainedModel, layers: Sequence[nn.Module], by: Kind, size: int) -> Family:
    """Return the table row of the model's family; only tested families are supported.

    Raises:
        RoleError: the family does not support the division, or the model has parameters that the row does not contain.
    """
    kind = model.config.model_type
    row = find_family(kind, by)
    if row is None:
        raise RoleError(
            f"trainer.parallelism.{by} ({size}) {explain_undivided(kind, by, size)}", exit_codes.CONFIGURATION
        )
    if "tp" in row.by:
        _check_named(model, layers, row, kind, f"{by} ({size})", fix=f"set {by}: 1 and share it by dpShard")
    return row


def divide_layers(model: PreTrainedModel, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Divide attention and dense feed-forward of every layer over `mesh`, in place. Parameters become DTensors.

    Raises:
        RoleError: the model's family is unknown, a layer has parameters that the table does not contain, or the size does not divide
            heads or columns.
    """
    row = check_family(model, layers, "tp", mesh.size())
    # torch warns about each tensor gathered over two mesh dimensions, which happens at every publication.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _check_divisible(model, layers, row, mesh.size())
    for layer in layers:
        trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        parallelize_module(layer, mesh, _plan_layer(model, layer, row))
        for attribute in row.counts:
            _divide_count(layer, attribute, mesh.size())
        for name, parameter in layer.named_parameters():  # a copied norm loses `requires_grad=False`
            parameter.requires_grad_(trained[name])
    group = mesh.get_group()

    def embedded(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return scale_gradient(output, 1 / mesh.size())  # each rank has the complete gradient, and FSDP sums them

    def left_layers(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (copy_to(inputs[0], group), *inputs[1:])

    model.get_input_embeddings().register_forward_hook(embedded)
    last_norm = getattr(model.get_decoder(), row.last_norm)
    if not isinstance(last_norm, Elsewhere):  # otherwise the last layer is in another stage
        last_norm.register_forward_pre_hook(left_layers)


def _check_named(
    model: PreTrainedModel, layers: Sequence[nn.Module], row: Family, kind: str, field: str, *, fix: str
) -> None:
    unknown = {name for layer in layers for name, _ in layer.named_parameters() if not row.names(name)}
    decoder = model.get_decoder()
    known = {
        id(one)
        for part in (*layers, model.get_input_embeddings(), getattr(decoder, row.last_norm))
        for one in part.parameters()
    }
    unknown |= {name for name, parameter in decoder.named_parameters() if id(parameter) not in known}
    if unknown:
        raise RoleError(
            f"trainer.parallelism.{field}: the model's type is {kind}, but it has {', '.join(sorted(unknown))}, which "
            f"this type normally lacks; {fix}",
            exit_codes.CONFIGURATION,
        )


def _check_divisible(model: PreTrainedModel, layers: Sequence[nn.Module], row: Family, tp: int) -> None:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    sizes = [("key-value heads", getattr(config, "num_key_value_heads", heads)), ("attention heads", heads)]
    for layer in layers:  # experts are distributed instead
        sizes += [
            ("intermediate size", module.out_features // len(row.joined.get(name, "1")))
            for name, module in layer.named_modules()
            if name.startswith("mlp.") and (name in row.columns or name in row.joined)
        ]
    if (problem := tensor_problem(tp, sizes)) is not None:
        raise RoleError(f"trainer.parallelism.tp ({tp}) {problem}", exit_codes.CONFIGURATION)


def _plan_layer(model: PreTrainedModel, layer: nn.Module, row: Family) -> dict[str, ParallelStyle]:
    there = dict(layer.named_modules())
    plan: dict[str, ParallelStyle] = {name: Columns(copied=row.in_place) for name in row.columns if name in there}
    plan |= {name: Rows() for name in row.rows if name in there}
    for name in row.norms:  # all ranks share the weight, and its gradient is summed over them
        if name in there and any(True for _ in there[name].parameters()):
            plan[name] = SequenceParallel(sequence_dim=row.norm_heads, use_local_output=True)
    for name, widths in row.joined.items():
        if name in there:
            plan[name] = Joined([_layer_width(model, there[name], width) for width in widths])
    return plan


def _layer_width(model: PreTrainedModel, module: Any, width: Width) -> int:
    config = model.config.get_text_config()
    head: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes: dict[Width, int] = {
        "queries": config.num_attention_heads * head,
        "keys": config.num_key_value_heads * head,
        "half": module.out_features // 2,
    }
    return sizes[width]


def _divide_count(layer: nn.Module, attribute: str, tp: int) -> None:
    """Divide a number of heads that a layer's code reads. A configuration is copied first, because the model's must keep the total
    number.
    """
    path, _, name = attribute.rpartition(".")
    owner: Any = layer
    for step in path.split("."):
        inner = getattr(owner, step)
        if not isinstance(inner, nn.Module):
            inner = copy.copy(inner)
            setattr(owner, step, inner)
        owner = inner
    setattr(owner, name, getattr(owner, name) // tp)
