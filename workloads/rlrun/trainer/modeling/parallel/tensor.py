"""Tensor parallelism (arXiv:1909.08053): each rank has a part of the heads and of the feed-forward's columns.

The table of families (`rlrun.config.families`) defines the division of each module. Outside of the layers nothing is divided by columns:
FSDP also shards embedding, last norm and head over the tensor ranks, and each rank computes a part of the positions there (`rows`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from rlrun.config.division import tensor_problem
from rlrun.config.families import Family, Kind, Width, explain_undivided, find_family
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.parallel.collectives import copy_to, scale_gradient
from rlrun.trainer.modeling.parallel.stages import Elsewhere
from rlrun.trainer.modeling.parallel.styles import Columns, Joined, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
