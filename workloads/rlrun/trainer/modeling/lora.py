"""Low-rank adapters in a model: W x + (alpha / r) B A x, with W frozen (Hu et al., 2021, arXiv:2106.09685; the numbers are PEFT's).

A linear layer keeps its name and its `weight`; A and B are two more parameters of it. So whatever shards, loads or publishes parameters by
name does not change. Only what is trained has gradients, optimizer state and a place in the checkpoint.
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

from rlrun.config.models.lora import LoRAConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.parallel.stages import of_all_stages
from rlrun.trainer.modeling.shard import decoder_layers
from rlrun.trainer.modeling.tensor_names import tensor_parts

PARAMETERS = ("lora_A", "lora_B")
_WEIGHT_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))")


class LoRALinear(nn.Linear):  # type: ignore[misc]  # torch is not type-checked
    """A frozen linear layer with a trained low-rank update.

    Attributes:
        lora_A: `[rank, in]` fp32, uniform in +-1/sqrt(in) at first.
        lora_B: `[out, rank]` fp32, 0 at first: the model starts as it was.
        rank: of the run whose adapter it is; the rows of A and columns of B beyond it are 0, and stay so: each is the other's gradient.
        scaling: alpha / rank.
        dropout: share of the update's inputs that is zeroed in training.
    """

    lora_A: nn.Parameter  # noqa: N815  the names that PEFT's files have
    lora_B: nn.Parameter  # noqa: N815
    rank: int
    scaling: float
    dropout: float
    _scale: Tensor
    """`scaling`, [] fp32: compiled code takes it as an input, and is the same for runs of all scales that take turns."""

    @classmethod
    def convert(cls, layer: nn.Linear, config: LoRAConfig) -> LoRALinear:
        """Make `layer` one of these, in place: hooks, name and weight stay."""
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
        """Compute with the numbers of a run, whose rank is at most the one that the layer was converted with."""
        self.rank, self.scaling, self.dropout = config.rank, config.alpha / config.rank, config.dropout
        self.place()

    def place(self) -> None:
        """Have the scale where the parameters are now."""
        self._scale = torch.full((), self.scaling, device=self.lora_A.device)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        update = linear(linear(dropout(input, self.dropout, self.training), self.lora_A), self.lora_B)
        return linear(input, self.weight, self.bias) + self._scaled(update)

    def _scaled(self, update: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # in float32, as a product with a number is computed
            return (update.float() * self._scale).to(update.dtype)
        return update * self.scaling


@dataclass(frozen=True)
class Update:
    """The update of one weight matrix."""

    a: Tensor
    """`[rank, in]`."""
    b: Tensor
    """`[out, rank]`."""
    scaling: float


def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling B A in float32, `[out, in]`; the caller casts it."""
    return weight.float() + scaling * (b.float() @ a.float())


def inject_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Give the model its adapters and freeze the rest, in place, before it is sharded. `initialize_adapters` then sets A and B.

    Raises:
        RoleError: a pattern matches nothing, or asks for an adapter of a layer that is trained in full; names it and what there is. Or no
            layer can have one.
    """
    candidates = _candidate_layers(model)
    if not candidates:
        raise RoleError(
            f"lora: {type(model).__name__} computes its layers without linear layers that adapters could be of; leave lora out",
            exit_codes.CONFIGURATION,
        )
    chosen = select_names(candidates, config.targets or ["*"], "targets", "linear layers of attention and MLP")
    holders = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    saved = select_names(holders, config.modules_to_save, "modulesToSave", "modules")
    adapted_layers = [name for name in chosen if not any(f"{name}.".startswith(f"{full}.") for full in saved)]
    if not adapted_layers:
        raise RoleError(
            f"lora.modulesToSave {config.modules_to_save} trains every layer of lora.targets in full; no adapter is left",
            exit_codes.CONFIGURATION,
        )
    model.requires_grad_(False)
    for name in adapted_layers:
        LoRALinear.convert(candidates[name], config)
    for name in saved:
        model.get_submodule(name).requires_grad_(True)


def _candidate_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Layers in which an adapter acts, by name: linear layers that compute as torch's do, and that their owner calls.

    A router may be a linear layer with more in its `forward`, and code that reads a layer's weight itself (Gemma 3n's `altup`) leaves out
    its adapter.
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
    """Attributes of a module whose weights its code reads, beyond their format."""
    try:
        return frozenset(_WEIGHT_READ.findall(inspect.getsource(owner)))
    except (OSError, TypeError):  # there is no source
        return frozenset()


def select_names(names: Iterable[str], patterns: Sequence[str], field: str, kind: str) -> list[str]:
    """The names, in order, that end in one of the patterns (at a dot).

    Raises:
        RoleError: a pattern matches none of them.
    """
    known = list(names)
    matches = {pattern: {name for name in known if matches_pattern(name, pattern)} for pattern in patterns}
    for pattern, found in matches.items():
        if not found:
            endings = sorted({name.rsplit(".", 1)[-1] for name in known if not name.rsplit(".", 1)[-1].isdigit()})
            raise RoleError(
                f"lora.{field}: {pattern!r} matches none of the model's {kind}; their names end in {', '.join(endings)}",
                exit_codes.CONFIGURATION,
            )
    return [name for name in known if any(name in found for found in matches.values())]


def matches_pattern(name: str, pattern: str) -> bool:
    """True if the pattern is the name or the end of it after a dot; `*` stands for anything."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def layers_with_adapter(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def configure_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Let all layers compute with the numbers of a run."""
    for layer in layers_with_adapter(model).values():
        layer.configure(config)


def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Set A and B to where training starts: a function of seed, layer name and rank alone, whatever the processes that hold them."""
    for name, layer in layers_with_adapter(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/lora/{name}".encode()))
        bound = 1 / math.sqrt(layer.in_features)
        start = torch.zeros(layer.lora_A.shape)
        start[: layer.rank] = torch.empty(layer.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        fill_parameter(layer.lora_A, start)
        fill_parameter(layer.lora_B, torch.zeros(layer.lora_B.shape))
        layer.place()


def fill_parameter(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter, or this rank's shard of it, from the whole tensor that every rank has."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole, target = whole.to(parameter.device, parameter.dtype), parameter.detach()
    if isinstance(target, DTensor):
        mine = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(mine.to_local())
    else:
        target.copy_(whole)


def weight_updates(model: nn.Module) -> dict[str, Update]:
    """The update of every adapted weight, by the weight's name."""
    return {f"{name}.weight": Update(m.lora_A, m.lora_B, m.scaling) for name, m in layers_with_adapter(model).items()}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A and B under the names that PEFT's files have; `cut` makes them whole tensors of the run's rank.

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
    """Names of the adapted layers in the model's files, which engines go by.

    Raises:
        RoleError: a layer's weight is a part of another tensor there, so that no engine has such a layer; names it.
    """
    weights = {f"{name}.weight": layer.weight for name, layer in layers_with_adapter(model).items()}
    found = {}
    for part in tensor_parts(model, weights):
        name, stored = part.names[0].removesuffix(".weight"), next(iter(part.files)).removesuffix(".weight")
        if part.converted:
            raise RoleError(
                f"lora.targets: {name} is another tensor ({stored}) in the model's files, so that engines take no adapter of it; "
                "leave it out of lora.targets",
                exit_codes.CONFIGURATION,
            )
        found[name] = stored
    return found


def cut_to_rank(name: str, whole: Tensor, rank: int) -> Tensor:
    """Part of a whole A or B in a file: its first `rank` rows or columns."""
    return whole[:rank] if ".lora_A." in name else whole[:, :rank]


def adapter_config(model: nn.Module, config: LoRAConfig, source: str) -> dict[str, object]:
    """PEFT's `adapter_config.json`.

    Args:
        model: with its adapters.
        config: of the adapters.
        source: the base model's folder or hub name.
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
    """Last parts of the adapted layers' names in files, where they mean these layers and no others; else the whole names."""
    of_stages = of_all_stages(model, (_names_in_files(model), [name for name, _ in model.named_modules()]))
    chosen = {name: stored for found, _ in of_stages for name, stored in found.items()}
    modules = {name for _, names in of_stages for name in names}
    endings = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name in modules if name.rsplit(".", 1)[-1] in endings}
    return {(name.rsplit(".", 1)[-1] if meant == {*chosen} else name) for name in chosen.values()}


def of_adapter(parameter: str) -> bool:
    """True if a parameter of this name is an adapter's, and none of the model's own."""
    return parameter.rsplit(".", 1)[-1] in PARAMETERS
