"""Encoders of models for images or sound, whose language model is trained on text.

Engines serve such a repository with the class that has the encoders, so the trainer builds this class too (`fit.model_sources.auto_class`),
loads the encoders, keeps them frozen, and publishes them unchanged. A row of text does not call them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_ENCODERS = ("vision_config", "audio_config")
"""Attributes of a configuration with the encoders' own configurations."""


def text_decoder(model: nn.Module) -> nn.Module:
    """Return the decoder of a model's language model, or the model itself if it has no separate decoder."""
    find: Any = getattr(model, "get_decoder", None)
    decoder = None if find is None else find()
    return decoder if isinstance(decoder, nn.Module) else model


def encoder_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with parameters that are outside of decoder and head, by name; empty for models of text only."""
    config = getattr(model, "config", None)
    decoder = text_decoder(model)
    if decoder is model or all(getattr(config, name, None) is None for name in _ENCODERS):
        return {}
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    text = {id(module) for part in (decoder, get_head()) if part is not None for module in part.modules()}
    return dict(_outside(model, text, ""))


def freeze_encoders(model: nn.Module) -> None:
    """Freeze the encoders in place, before sharding: ranks would wait for gradients of parameters that no row of text reaches."""
    for part in encoder_parts(model).values():
        part.requires_grad_(False)


def _outside(module: nn.Module, text: set[int], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if id(child) in text:
            continue
        if any(id(inner) in text for inner in child.modules()):
            yield from _outside(child, text, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child
