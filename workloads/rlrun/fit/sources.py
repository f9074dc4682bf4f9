"""Sources of a model's shape: its folder, the hub's cache on this machine, a table, or what a tiny model is made with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlrun.config.models.model import ModelConfig, TinyModelConfig
from rlrun.fit.architecture import Architecture, ShapeError, from_config
from rlrun.fit.known_models import KNOWN, known_model

_CONFIG = "config.json"
_TINY_VOCABULARY = 128
"""More than the character tokenizer has."""


class UnknownModelError(ValueError):
    """Error for a model whose shape is not at hand; names the field and the fix."""


def shape_of(
    model: ModelConfig,
    field: str,
    *,
    option: str = "--model-config",
    count: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Architecture:
    """A model's shape, without a network.

    Args:
        model: which one.
        field: of the manifest that names it.
        option: of the command line that names its configuration instead.
        count: whether to count parameters in the model where its type is not known here, which may import torch.
        environment: says where the hub's cache is.

    Raises:
        UnknownModelError: it is not known here, or its configuration is none.
    """
    if model.tiny is not None:
        return _tiny_architecture(model.tiny)
    if model.path is not None:
        return read_shape(Path(model.path), f"{field}.path", option=option, count=count)
    name = model.name or ""
    if (known := known_model(name)) is not None:
        return known
    if (folder := cached_folder(name, environment)) is not None:
        return read_shape(folder, f"{field}.name", option=option, count=count)
    raise UnknownModelError(
        f"{field}.name ({name}) is neither on this machine nor one of the {len(KNOWN)} models whose sizes are known here; "
        f"name a folder with its config.json: {option} FOLDER"
    )


def read_shape(folder: Path, field: str, *, option: str = "--model-config", count: bool = True) -> Architecture:
    """The shape that a folder's `config.json`, or such a file, describes.

    Raises:
        UnknownModelError: there is none, or it describes no language model.
    """
    file = folder / _CONFIG if folder.is_dir() else folder
    try:
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise ShapeError("it is no JSON object")
        shape = from_config(config)
    except OSError as error:
        raise UnknownModelError(
            f"{field}: {file} cannot be read: {error.strerror}; name a folder with config.json: {option} FOLDER"
        ) from None
    except ValueError as error:
        raise UnknownModelError(f"{field}: {file}: {error}") from None
    if shape.exact or not count or (model := _on_meta(config)) is None:
        return shape
    tied = (
        model.get_output_embeddings() is not None
        and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    return replace(shape, counted=_count_parameters(model), tied=tied)


def count_on_meta(config: Mapping[str, object]) -> int | None:
    """Parameters of a model that transformers builds without memory; None where it is not installed, or does not know the type."""
    model = _on_meta(config)
    return None if model is None else _count_parameters(model)


def _count_parameters(model: Any) -> int:
    return sum(int(parameter.numel()) for parameter in model.parameters())


def _on_meta(config: Mapping[str, object]) -> Any | None:
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return None
    kind = str(config.get("model_type", ""))
    try:
        with torch.device("meta"):
            own = {name: value for name, value in config.items() if name != "model_type"}
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **own))
    except Exception:  # the code of any architecture
        return None


def cached_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Folder of a repository in the hub's cache on this machine; None: it is not there."""
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    found = sorted((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob(f"*/{_CONFIG}"))
    return found[-1].parent if found else None


def _tiny_architecture(tiny: TinyModelConfig) -> Architecture:
    heads = max(tiny.hidden_size // 32, 2)
    return Architecture(
        "llama",
        hidden=tiny.hidden_size,
        layers=tiny.layers,
        heads=heads,
        kv_heads=max(tiny.hidden_size // 64, 1),
        head_dim=tiny.hidden_size // heads,
        intermediate=3 * tiny.hidden_size,
        vocabulary=_TINY_VOCABULARY,
    )
