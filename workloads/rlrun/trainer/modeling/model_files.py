"""Files and tensors of a model folder for transformers and vLLM."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from rlrun.config.models.language_models import ModelConfig
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.parallel.pipeline_stages import second_copy
from rlrun.trainer.modeling.router_balance import BIAS
from rlrun.trainer.modeling.source_config import source_config

_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model for images that describe how an image becomes tensors."""


@dataclass(frozen=True)
class ModelFiles:
    """Small files of a model folder by name: `config.json`, `generation_config.json`, and the files of tokenizer and processors."""

    contents: Mapping[str, bytes]


def model_files(model: nn.Module, config: ModelConfig, source: str) -> ModelFiles:
    """Read the small files of all version folders; `config.json` gets the published number format."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=config.revision or "main", trust_remote_code=config.trust_remote_code
        )
        tokenizer.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if isinstance(generation, GenerationConfig):
            generation.save_pretrained(folder)
        document = _source_config(model, config, source).to_dict() | {"dtype": config.dtype, "use_cache": True}
        document["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        document.pop("_attn_implementation", None)
        (folder / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True, default=str) + "\n")
        _copy_processors(source, config, folder)
        return ModelFiles({path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()})


def _copy_processors(source: str, config: ModelConfig, folder: Path) -> None:
    """Copy the options of image processors unchanged, because their classes need packages that a trainer of text does not have."""
    for name in _PROCESSORS:
        found = cached_file(
            source, name, revision=config.revision or "main", _raise_exceptions_for_missing_entries=False
        )
        if found is not None:
            shutil.copyfile(found, folder / name)


def _source_config(model: Any, config: ModelConfig, source: str) -> PreTrainedConfig:
    """Read the original configuration, because dropout is removed from the model's configuration."""
    original = source_config(config, source)
    return original if type(original) is type(model.config) else original.get_text_config()


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a version's files by name: each parameter once (tied ones under their first name) and persistent buffers,
    without adapters.

    In a pipeline these are the tensors of this rank's stages.
    """
    state, copy = model.state_dict(), second_copy(model)
    first = {name for name, one in model.named_parameters() if not lora.of_adapter(name) and one is not copy}
    buffers = {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name in first or name in buffers}


def published_format(name: str, tensor: Tensor, number_format: torch.dtype) -> torch.dtype:
    """Return the number format of a tensor in a version's files.

    Correction biases of routers stay in float32, as in the files of their models: bfloat16 would round the steps of
    `trainer.router.bias: Update` away, and engines would choose other experts than the trainer.

    Args:
        name: name of the tensor in memory.
        tensor: tensor of the policy.
        number_format: format of the weights.
    """
    own: torch.dtype = tensor.dtype
    if not tensor.is_floating_point():
        return own
    return torch.float32 if name.endswith(BIAS) else number_format
