"""Sources of a model's shape: its folder, the hub's local cache, a table, or the sizes of a tiny model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlrun.config.models.language_models import ModelConfig, TinyModelConfig
from rlrun.fit.architecture import KNOWN, Architecture, ShapeError, from_config, known_model
from rlrun.model_class import ModelClassError, build_own_on_meta

_CONFIG = "config.json"
_TINY_VOCABULARY = 128
"""Upper bound of the character tokenizer's vocabulary."""


class UnknownModelError(ValueError):
    """Error for a model of unknown shape. The message has the field and the fix."""


def shape_of(
    model: ModelConfig,
    field: str,
    *,
    option: str = "--model-config",
    count: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Architecture:
    """Return a model's shape without network access.

    Args:
        model: source of the model.
        field: field of the manifest that names the model.
        option: option of the command line that replaces the model's configuration.
        count: whether to count the parameters of unknown model types and of own classes in the model itself, which may import torch.
        environment: environment variables, which contain the folder of the hub's cache.

    Raises:
        UnknownModelError: The shape is unknown, or the configuration does not describe a language model.
    """
    if model.tiny is not None:
        return _tiny_architecture(model.tiny)
    if model.path is not None:
        shape = read_shape(Path(model.path), f"{field}.path", option=option, count=count and model.class_ is None)
        return _count_own(shape, model.class_, Path(model.path), option=option) if count else shape
    name = model.name or ""
    if model.class_ is None and (known := known_model(name)) is not None:
        return known
    if (folder := cached_folder(name, environment)) is not None:
        shape = read_shape(folder, f"{field}.name", option=option, count=count and model.class_ is None)
        return _count_own(shape, model.class_, folder, option=option) if count else shape
    raise UnknownModelError(
        f"{field}.name ({name}) is neither in the hub's cache on this machine nor one of the {len(KNOWN)} models with known sizes; "
        f"pass a folder with its config.json: {option} FOLDER"
    )


def read_shape(folder: Path, field: str, *, option: str = "--model-config", count: bool = True) -> Architecture:
    """Return the shape that a folder's `config.json`, or another file of this format, describes.

    Raises:
        UnknownModelError: The file is missing or does not describe a language model.
    """
    file = folder / _CONFIG if folder.is_dir() else folder
    try:
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise ShapeError("it is not a JSON object")
        shape = from_config(config)
    except OSError as error:
        raise UnknownModelError(
            f"{field}: {file} cannot be read: {error.strerror}; pass a folder with config.json: {option} FOLDER"
        ) from None
    except ValueError as error:
        raise UnknownModelError(f"{field}: {file}: {error}") from None
    if shape.is_exact or not count or (model := _on_meta(config)) is None:
        return shape
    return _counted(shape, model)


def _count_own(shape: Architecture, own: str | None, folder: Path, *, option: str) -> Architecture:
    """Return the shape with the parameters of a run's own class at import path `own`, or the same shape for None."""
    if own is None:
        return shape
    try:
        model = build_own_on_meta(own, str(folder))
    except ModelClassError as error:
        raise UnknownModelError(f"{error} (for an estimate by its config.json: {option} FOLDER)") from None
    return _counted(shape, model)


def _counted(shape: Architecture, model: Any) -> Architecture:
    tied = (
        model.get_output_embeddings() is not None
        and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    counted = sum(int(parameter.numel()) for parameter in model.parameters())
    return replace(shape, counted=counted, tied=tied, encoder=_count_encoders(model))


def _count_encoders(model: Any) -> int:
    """Return the number of parameters outside of decoder and head, which the trainer freezes; 0 for a model of text only."""
    decoder = model.get_decoder()
    if decoder is model or all(getattr(model.config, name, None) is None for name in ("vision_config", "audio_config")):
        return 0
    parts = [part for part in (decoder, model.get_output_embeddings()) if part is not None]
    text = {id(parameter) for part in parts for parameter in part.parameters()}
    return sum(int(parameter.numel()) for parameter in model.parameters() if id(parameter) not in text)


def _on_meta(config: Mapping[str, object]) -> Any | None:
    try:
        import torch
        from transformers import AutoConfig
    except ImportError:
        return None
    kind = str(config.get("model_type", ""))
    try:
        with torch.device("meta"):
            own = {name: value for name, value in config.items() if name != "model_type"}
            found = AutoConfig.for_model(kind, **own)
            return auto_class(found).from_config(found)
    except Exception:  # any code of an architecture may fail
        return None


def auto_class(config: Any) -> Any:
    """Return the class of transformers (`AutoModelFor...`) that builds all parts of a language model, which is also the class in engines.

    For some types with images the causal class builds only the language model (Qwen 3.5), and for others it does not exist (Qwen3-VL).
    Code in the repository itself defines causal language models.

    Args:
        config: `PreTrainedConfig` of the whole model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    has_class = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if getattr(config, "vision_config", None) is not None and has_class and not own_code:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def cached_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of a repository in the hub's local cache, or None."""
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
