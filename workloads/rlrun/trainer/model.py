"""Load a Hugging Face causal LM and shard it over the ranks (FSDP2): float32 masters, summed gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlrun.config.model import ModelConfig
from rlrun.protocol import exit_codes
from rlrun.protocol.failures import RoleError
from rlrun.trainer import attention
from rlrun.trainer.group import Group

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def check_source(config: ModelConfig, source: str) -> None:
    """Look at the model's folder before anything is loaded.

    Raises:
        RoleError: it is missing or holds no configuration or no weights; names what is missing.
    """
    if config.name is not None:
        return
    folder = Path(source)
    if not folder.is_dir():
        raise RoleError(f"model.path {source} is not a folder", exit_codes.DATA)
    if not (folder / "config.json").is_file():
        raise RoleError(f"the model folder {source} has no config.json", exit_codes.DATA)
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise RoleError(
            f"the model folder {source} has no weights: expected {_WEIGHTS[0]} or {_WEIGHTS[1]}", exit_codes.DATA
        )


def load_model(config: ModelConfig, source: str, *, with_weights: bool = True) -> nn.Module:
    """The model in float32 on the CPU, with packed attention; without weights it is left random, to be filled from a checkpoint.

    Raises:
        RoleError: transformers cannot load it; says why in one line.
    """
    attention.register()
    disable_progress_bar()
    options: dict[str, Any] = {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    shape: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    try:
        if with_weights:
            model = AutoModelForCausalLM.from_pretrained(source, **options, **shape)
        else:
            architecture = AutoConfig.from_pretrained(source, **options)
            model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code, **shape)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RoleError(f"cannot load the model {source}: {reason[0]}", exit_codes.DATA) from error
    model.config.use_cache = False
    return model


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers, wherever the architecture keeps it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise RoleError(f"{type(model).__name__} has no list of {count} decoder layers to shard", exit_codes.DATA)


def shard(model: nn.Module, group: Group) -> nn.Module:
    """Shard every decoder layer and the rest over the group, in place.

    Gradients are summed over the ranks, not averaged: each rank's loss is already divided by the global token count.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if group.device.type == "cuda" else MixedPrecisionPolicy()
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=group.mesh, mp_policy=policy)
    fully_shard(model, mesh=group.mesh, mp_policy=policy)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction; dividing by 1 is left out
    model.to(group.device)  # buffers; FSDP has moved the parameters
    return model.train()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP shards as a unit, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
