"""Tensor parallelism (arXiv:1909.08053): each rank has some of the heads and some of the feed-forward's columns.

Outside of the layers nothing is divided by columns: embedding, last norm and head are FSDP's over these ranks too, and each rank computes
its part of the positions there (`rows`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.parallel.collectives import copy_to, scale_gradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PARAMETERS = ("lora_A", "lora_B")
"""Parameters of a linear layer with an adapter (`rlrun.trainer.modeling.lora`)."""
FAMILIES = ("llama", "qwen3", "qwen3_moe")
"""Model types whose layers are known here."""


def check_family(model: PreTrainedModel, name: str, size: int) -> None:
    """Refuse what was never checked against one rank.

    Raises:
        RoleError: the model is none of the families.
    """
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise RoleError(
            f"trainer.parallelism.{name} ({size}) is for the model types {', '.join(FAMILIES)}, the model is of type {kind}; "
            f"set {name}: 1 and share it by dpShard",
            exit_codes.CONFIGURATION,
        )


def _check_divisible(model: PreTrainedModel, tp: int) -> None:
    config = model.config
    sizes = {"key-value heads": config.num_key_value_heads, "attention heads": config.num_attention_heads}
    if any(
        "down_proj.weight" in name for name, _ in model.named_parameters()
    ):  # a mixture's experts are dealt out instead
        sizes["intermediate size"] = config.intermediate_size
    for what, size in sizes.items():
        if size % tp:
            raise RoleError(
                f"trainer.parallelism.tp ({tp}) must divide the model's {what} ({size}); lower tp",
                exit_codes.CONFIGURATION,
            )


def divide_layers(model: PreTrainedModel, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Divide attention and dense feed-forward of every layer over `mesh`, in place. Parameters become DTensors.

    Raises:
        RoleError: the model's family is not known, or its heads cannot be divided by the size.
    """
    check_family(model, "tp", mesh.size())
    # It warns for every tensor that is gathered from two dimensions, as publishing does, that one collective would be faster.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _check_divisible(model, mesh.size())
    for layer in layers:
        trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        parallelize_module(layer, mesh, _plan(layer))
        for name, parameter in layer.named_parameters():  # a copied norm forgets that it is frozen
            parameter.requires_grad_(trained[name])
    group = mesh.get_group()
    decoder = model.get_decoder()

    def embedded(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return scale_gradient(output, 1 / mesh.size())  # each rank has the whole gradient, and FSDP adds them up

    def left_layers(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (copy_to(inputs[0], group), *inputs[1:])

    decoder.embed_tokens.register_forward_hook(embedded)
    decoder.norm.register_forward_pre_hook(left_layers)


class _Columns(ColwiseParallel):  # type: ignore[misc]  # torch is not type-checked
    """Division by columns, also of a layer with an adapter: B is divided by rows as the weight is, A is whole on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        adapter = _take_adapter(module)
        super()._partition_linear_fn(name, module, device_mesh)
        _put_adapter(module, adapter, device_mesh, lora_A=Replicate(), lora_B=Shard(0))


class _Rows(RowwiseParallel):  # type: ignore[misc]
    """Division by rows, also of a layer with an adapter: A is divided by columns as the weight is, B is whole on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        adapter = _take_adapter(module)
        super()._partition_linear_fn(name, module, device_mesh)
        _put_adapter(module, adapter, device_mesh, lora_A=Shard(1), lora_B=Replicate())


def _take_adapter(module: nn.Module) -> dict[str, nn.Parameter]:
    names = [name for name in module._parameters if name in PARAMETERS]
    return {name: module._parameters.pop(name) for name in names}


def _put_adapter(
    module: nn.Module, adapter: dict[str, nn.Parameter], mesh: DeviceMesh, **placements: Placement
) -> None:
    for name, parameter in adapter.items():  # its values are set later, from the seed
        divided = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _plan(layer: Any) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {f"self_attn.{name}": _Columns() for name in ("q_proj", "k_proj", "v_proj")}
    plan["self_attn.o_proj"] = _Rows()
    for name in ("q_norm", "k_norm"):  # one weight for all heads: its gradient is a sum over the ranks
        if hasattr(layer.self_attn, name):
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if hasattr(layer.mlp, "down_proj"):
        plan |= {
            "mlp.gate_proj": _Columns(),
            "mlp.up_proj": _Columns(),
            "mlp.down_proj": _Rows(),
        }
    return plan
