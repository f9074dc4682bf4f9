"""Low-rank adapters: W x + (alpha / r) B A x with frozen W (Hu et al., 2021, arXiv:2106.09685; the numbers equal PEFT's).

A linear layer keeps its name and its `weight`, and gets the parameters A and B. Therefore code that shards, loads or publishes parameters
by name does not change. Only trained parameters have gradients, optimizer states and entries in checkpoints.
"""

from __future__ import annotations

import inspect
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from rlrun.config.models.language_models import LoRAConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.encoders import encoder_parts
from rlrun.trainer.modeling.parallel.pipeline_stages import of_all_stages
from rlrun.trainer.modeling.shard import decoder_layers
from rlrun.trainer.modeling.tensor_names import tensor_parts

PARAMETERS = ("lora_A", "lora_B")
_WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")


class LoRALinear(nn.Linear):  # type: ignore[misc]  # torch is not type-checked
    """Frozen linear layer with a trained low-rank update.

    Attributes:
        lora_A: matrix A, `[rank, in]` fp32, initially uniform in +-1/sqrt(in).
        lora_B: matrix B, `[out, rank]` fp32, initially 0, so that the model is unchanged.
        rank: rank of the current run. The rows of A and columns of B beyond it stay 0, because the gradient of each is a multiple of the
            other.
        scaling: alpha / rank.
        dropout: fraction of the update's inputs that is zeroed in training.
    """

    lora_A: nn.Parameter  # noqa: N815  names of PEFT's files
    lora_B: nn.Parameter  # noqa: N815
    rank: int
    scaling: float
    dropout: float
    _scale: Tensor
    """`scaling` as a tensor, `[]` fp32: an input of compiled code, which is the same for runs with different scalings."""

    @classmethod
    def convert(cls, layer: nn.Linear, config: LoRAConfig) -> LoRALinear:
        """Convert `layer` in place; hooks, name and weight are kept."""
        weight = layer.weight
        layer.__class__ = cls
        assert isinstance(layer, LoRALinear)
        for name, shape in (
            ("lora_A", (config.rank, layer.in_features)),
            ("lora_B", (layer.out_features, config.rank)),
        ):
            empty = torch.empty(shape, dtype=torch.float32, device=weight.device)
            layer.register_parameter(name, nn.Parameter(empty))
        layer.configure(config)
        return layer

    def configure(self, config: LoRAConfig) -> None:
        """Set rank, scaling and dropout of a run; its rank must not exceed the rank of the conversion."""
        self.rank, self.scaling, self.dropout = config.rank, config.alpha / config.rank, config.dropout
        self.place_scale()

    def place_scale(self) -> None:
        """Move the scale to the device of the parameters."""
        self._scale = torch.full((), self.scaling, device=self.lora_A.device)

    def forward(self, input: Tensor) -> Tensor:
        """Compute `[..., in]` -> `[..., out]`."""
        update = linear(linear(dropout(input, self.dropout, self.training), self.lora_A), self.lora_B)
        return linear(input, self.weight, self.bias) + self._scale_update(update)

    def _scale_update(self, update: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # in float32, like the product with a Python number
            return (update.float() * self._scale).to(update.dtype)
        return update * self.scaling


@dataclass(frozen=True)
class Update:
    """Low-rank update of one weight matrix."""

    a: Tensor
    """Matrix A, `[rank, in]`."""
    b: Tensor
    """Matrix B, `[out, rank]`."""
    scaling: float


def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + scaling B A in float32, `[out, in]`; the caller casts it."""
    return weight.float() + scaling * (b.float() @ a.float())


def inject_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Add adapters to the model and freeze all other parameters, in place and before sharding. `initialize_adapters` sets A and B later.

    Raises:
        RoleError: no layer supports adapters, a pattern matches nothing, or all matching layers are trained completely; the message has
            the pattern and the available names.
    """
    candidates = _candidate_layers(model)
    if not candidates:
        raise RoleError(
            f"lora: {type(model).__name__} has no linear layers that support adapters; remove lora",
            exit_codes.CONFIGURATION,
        )
    chosen = select_names(candidates, config.targets or ["*"], "targets", "linear layers of attention and MLP")
    encoders = {id(module) for part in encoder_parts(model).values() for module in part.modules()}
    holders = [
        name
        for name, module in model.named_modules()
        if name
        and any(True for _ in module.parameters())
        and encoders.isdisjoint(id(inner) for inner in module.modules())
    ]
    saved = select_names(holders, config.modules_to_save, "modulesToSave", "modules")
    adapted_layers = [name for name in chosen if not any(f"{name}.".startswith(f"{full}.") for full in saved)]
    if not adapted_layers:
        raise RoleError(
            f"lora.modulesToSave {config.modules_to_save} trains every layer of lora.targets completely, so no adapter remains; "
            "remove a module or add targets",
            exit_codes.CONFIGURATION,
        )
    model.requires_grad_(False)
    for name in adapted_layers:
        LoRALinear.convert(candidates[name], config)
    for name in saved:
        model.get_submodule(name).requires_grad_(True)


def _candidate_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that support adapters, by name: linear layers with torch's `forward` that their parent module calls.

    A router may be a subclass with another `forward`. Code that reads a layer's weight directly (Gemma 3n's `altup`) would ignore the
    adapter.
    """
    layers = {id(module) for module in decoder_layers(model).modules()}
    found = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and id(module) in layers
    }
    return {
        name: module
        for name, module in found.items()
        if name.rpartition(".")[2] not in _read_weights(model.get_submodule(name.rpartition(".")[0]).__class__)
    }


@cache
def _read_weights(owner: type) -> frozenset[str]:
    """Return the submodules whose weights the code of a module reads, except for dtype, device and shape."""
    try:
        return frozenset(_WEIGHT_READ.findall(inspect.getsource(owner)))
    except (OSError, TypeError):  # the source code is not available
        return frozenset()


def select_names(names: Iterable[str], patterns: Sequence[str], field: str, kind: str) -> list[str]:
    """Return the names, in order, that match one of the patterns.

    Raises:
        RoleError: a pattern matches no name.
    """
    known = list(names)
    matches = {pattern: {name for name in known if matches_pattern(name, pattern)} for pattern in patterns}
    for pattern, found in matches.items():
        if not found:
            endings = sorted({name.rsplit(".", 1)[-1] for name in known if not name.rsplit(".", 1)[-1].isdigit()})
            raise RoleError(
                f"lora.{field}: {pattern!r} matches no {kind} of the model; use a name or ending such as {', '.join(endings)}",
                exit_codes.CONFIGURATION,
            )
    return [name for name in known if any(name in found for found in matches.values())]


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether the pattern matches the name or its end after a dot; `*` matches any characters."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def layers_with_adapter(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def configure_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Set the options of a run in all adapters."""
    for layer in layers_with_adapter(model).values():
        layer.configure(config)


def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Initialize A and B. The values depend only on seed, layer name and rank, not on the number of processes."""
    for name, layer in layers_with_adapter(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/lora/{name}".encode()))
        bound = 1 / math.sqrt(layer.in_features)
        start = torch.zeros(layer.lora_A.shape)
        start[: layer.rank] = torch.empty(layer.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        fill_parameter(layer.lora_A, start)
        fill_parameter(layer.lora_B, torch.zeros(layer.lora_B.shape))
        layer.place_scale()


def fill_parameter(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter, or this rank's shard of it, from a complete tensor that every rank has."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole, target = whole.to(parameter.device, parameter.dtype), parameter.detach()
    if isinstance(target, DTensor):
        mine = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(mine.to_local())
    else:
        target.copy_(whole)


def weight_updates(model: nn.Module) -> dict[str, Update]:
    """Return the low-rank updates by names of the weights."""
    return {f"{name}.weight": Update(m.lora_A, m.lora_B, m.scaling) for name, m in layers_with_adapter(model).items()}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return A and B under PEFT's file names; `cut_to_rank` cuts the complete tensors to the run's rank.

    Raises:
        RoleError: see `_names_in_files`.
    """
    layers = layers_with_adapter(model)
    return {
        f"base_model.model.{stored}.{parameter}.weight": getattr(layers[name], parameter)
        for name, stored in _names_in_files(model).items()
        for parameter in PARAMETERS
    }


def _names_in_files(model: nn.Module) -> dict[str, str]:
    """Return the names of the adapted layers in the model's files, which engines use.

    Raises:
        RoleError: the weight of a layer is part of another tensor in the files, so engines do not have such a layer.
    """
    weights = {f"{name}.weight": layer.weight for name, layer in layers_with_adapter(model).items()}
    found = {}
    for part in tensor_parts(model, weights):
        name, stored = part.names[0].removesuffix(".weight"), next(iter(part.files)).removesuffix(".weight")
        if part.converted:
            raise RoleError(
                f"lora.targets: {name} is another tensor ({stored}) in the model's files, so engines do not support an adapter of it; "
                "remove it from lora.targets",
                exit_codes.CONFIGURATION,
            )
        found[name] = stored
    return found


def cut_to_rank(name: str, whole: Tensor, rank: int) -> Tensor:
    """Cut a complete A or B to its first `rank` rows or columns."""
    return whole[:rank] if ".lora_A." in name else whole[:, :rank]


def adapter_config(model: nn.Module, config: LoRAConfig, source: str) -> dict[str, object]:
    """Return the content of PEFT's `adapter_config.json`.

    Args:
        model: model with adapters.
        config: options of the adapters.
        source: folder or hub name of the base model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(_short_names(model)),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _short_names(model: nn.Module) -> set[str]:
    """Return the last parts of the adapted layers' file names if they identify exactly these layers, otherwise the full names."""
    of_stages = of_all_stages(model, (_names_in_files(model), [name for name, _ in model.named_modules()]))
    chosen = {name: stored for found, _ in of_stages for name, stored in found.items()}
    modules = {name for _, names in of_stages for name in names}
    endings = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name in modules if name.rsplit(".", 1)[-1] in endings}
    return {(name.rsplit(".", 1)[-1] if meant == {*chosen} else name) for name in chosen.values()}


def of_adapter(parameter: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name."""
    return parameter.rsplit(".", 1)[-1] in PARAMETERS
