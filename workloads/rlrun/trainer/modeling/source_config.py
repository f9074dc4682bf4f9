"""Configuration and class of a model's source, as the trainer uses them: without quantization, because all tensors are read as plain
ones.
"""

from __future__ import annotations

import re
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rlrun.config.models.language_models import ModelConfig
from rlrun.fit.model_sources import auto_class
from rlrun.hub.repository import show_source
from rlrun.model_class import ModelClassError, import_model_class, read_own_config
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.noise import config_parts


def source_config(config: ModelConfig, source: str) -> PreTrainedConfig:
    """Read the configuration of a model. With `quantization_config`, transformers and vLLM would look for quantized tensors.

    Args:
        config: revision of the model, and trust in its code.
        source: folder or name on the hub.

    Raises:
        RoleError: transformers does not know the type of the model, its code is not trusted, or the run's own class cannot be used.
    """
    found: PreTrainedConfig
    try:
        if config.class_ is not None:
            found = read_own_config(config.class_, source, revision=config.revision)
        else:
            found = AutoConfig.from_pretrained(
                source, revision=config.revision or "main", trust_remote_code=config.trust_remote_code
            )
    except ModelClassError as error:
        raise RoleError(str(error), exit_codes.CONFIGURATION) from error
    except OSError:  # the file is missing or not JSON; callers report it
        raise
    except Exception as error:  # code of a configuration class may raise any error
        refusal = _type_refusal(str(error), source) or _content_refusal(error, source)
        raise RoleError(refusal, exit_codes.CONFIGURATION) from error
    for part in config_parts(found):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return found


def build_model(config: ModelConfig, architecture: PreTrainedConfig, **shape: Any) -> PreTrainedModel:
    """Create a model without the values of its files.

    Args:
        config: class of the model, and trust in its code.
        architecture: configuration of `source_config`.
        shape: number format and attention implementation.
    """
    built: PreTrainedModel
    if config.class_ is not None:
        built = import_model_class(config.class_)._from_config(architecture, **shape)
    else:
        built = auto_class(architecture).from_config(architecture, trust_remote_code=config.trust_remote_code, **shape)
    return built


def _type_refusal(error: str, source: str) -> str | None:
    """Return the message for a type that transformers does not know; None for other errors."""
    if "trust_remote_code" in error:
        return (
            f"model {show_source(source)} is defined by its own code (auto_map in config.json), which runs only if it is trusted; read the "
            "code, then set model.trustRemoteCode: true, or use a model of a type of transformers"
        )
    if (unknown := re.search(r"has model type `([^`]*)` but", error)) is None and "model_type" not in error:
        return None
    if unknown is None:
        return f"model {show_source(source)}: model_type in config.json is missing; set it, or use a model with a model_type"
    return (
        f"model {show_source(source)}: model_type in config.json is '{unknown[1]}', which transformers {transformers.__version__} does not "
        "support; use a model of a supported type, a repository with its own code (auto_map) and model.trustRemoteCode: true, or your "
        f"own class: model.class: package.module:Class, whose config_class has model_type '{unknown[1]}'"
    )


def _content_refusal(error: Exception, source: str) -> str:
    """Return the message for values that the configuration class of the type refuses; only the last line of an error has the field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"model {show_source(source)}: config.json is invalid: {lines[-1]}; correct it, or download it again"
