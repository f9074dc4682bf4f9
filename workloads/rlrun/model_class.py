"""A run's own model class (`model.class: package.module:Class`), instead of the class that transformers selects by `config.json`.

The class is a causal language model of transformers with its own configuration class. It is imported in every process that builds the
model, so its package must be installed in the images, or be in a folder of `PYTHONPATH`, as for losses and environments.
"""

from __future__ import annotations

from typing import Any

from rlrun.custom import imported
from rlrun.hub.repository import show_source

FIELD = "model.class"


class ModelClassError(ValueError):
    """Error for a class that cannot be used; the message has the field, its value and a fix."""


def import_model_class(path: str) -> Any:
    """Return the class at `package.module:Class`.

    Raises:
        ModelClassError: the module or the class does not exist, or the class is not a causal language model of transformers.
    """
    try:
        found: Any = imported(FIELD, path)
    except ValueError as error:
        raise ModelClassError(str(error)) from error
    import transformers

    name = path.partition(":")[2]
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ModelClassError(
            f"{FIELD} {path}: {kind} is not a transformers.PreTrainedModel; name a class that inherits from it"
        )
    config: Any = getattr(found, "config_class", None)
    if not isinstance(config, type) or not issubclass(config, transformers.PreTrainedConfig):
        config = None
    if not getattr(config, "model_type", ""):
        raise ModelClassError(
            f"{FIELD} {path}: it has no config_class with a model_type; set config_class to a PreTrainedConfig with a model_type"
        )
    if (existing := getattr(transformers, found.__name__, None)) is not None and existing is not found:
        # Files name the class in `architectures`, by which vLLM would select its own implementation of the other class.
        raise ModelClassError(
            f"{FIELD} {path}: transformers has another class {found.__name__}, which engines would use; rename {name}"
        )
    return found


def read_own_config(path: str, source: str, *, revision: str | None = None) -> Any:
    """Read the configuration of a model with the configuration class of its own class.

    Args:
        path: import path of the class.
        source: folder or name on the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        ModelClassError: the class cannot be used, or the file describes a model of another type.
        OSError: the file is missing or unreadable.
    """
    own = import_model_class(path).config_class
    document, _ = own.get_config_dict(source, revision=revision or "main")
    if (kind := document.get("model_type")) != own.model_type:
        raise ModelClassError(
            f"{FIELD} {path}: its {own.__name__} has model_type {own.model_type!r}, but config.json of {show_source(source)} has "
            f"{kind!r}; use a model of this type, or set the class of that one"
        )
    return own.from_pretrained(source, revision=revision or "main")


def build_own_on_meta(path: str, source: str) -> Any:
    """Build a model of its own class without memory for its tensors.

    Args:
        path: import path of the class.
        source: folder with `config.json`.

    Raises:
        ModelClassError: the class cannot be used, transformers is not installed, or the class raises an error.
    """
    try:
        import torch

        config = read_own_config(path, source)
        with torch.device("meta"):
            return import_model_class(path)._from_config(config)
    except ModelClassError:
        raise
    except Exception as error:  # code of the class may raise any error
        lines = str(error).strip().splitlines() or ["no message"]
        raise ModelClassError(f"{FIELD} {path}: cannot build it: {type(error).__name__}: {lines[0]}") from error


def register_for_engine(path: str) -> None:
    """Let vLLM's process find configuration and class, for vLLM's backend that runs the code of transformers.

    A package that registers its own vLLM class under the same name keeps it, because vLLM prefers registered classes.

    Raises:
        ModelClassError: the class cannot be used.
    """
    import torch
    import transformers

    own = import_model_class(path)
    config = own.config_class
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(config, own, exist_ok=True)
    # vLLM looks for classes without a vLLM implementation in the namespace of transformers, and builds their base model.
    setattr(transformers, own.__name__, own)
    with torch.device("meta"):
        base = type(own._from_config(config()).base_model)
    if base is not own:
        transformers.AutoModel.register(config, base, exist_ok=True)


def served_class_problem(path: str) -> str | None:
    """Return why no engine can serve the class, or None.

    Args:
        path: import path of the class.

    Raises:
        ModelClassError: the class cannot be used.
    """
    own = import_model_class(path)
    if own.is_backend_compatible() or own._can_set_attn_implementation():
        return None
    return (
        f"{FIELD} {path}: vLLM cannot compute {own.__name__}, because its attention is not selected by "
        "transformers' attention interface; call ALL_ATTENTION_FUNCTIONS in it and set _supports_attention_backend = True"
    )
