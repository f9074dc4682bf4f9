"""Small model of an architecture: narrow, with a layer of every kind, and with random weights that activate all parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from rlrun.trainer.modeling.noise import remove_noise
from rlrun.trainer.modeling.shard import decoder_layers
from rlrun.trainer.proof.small_config import shrink_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_GAIN = 1.5
_LEAST_LAYERS = 2
_NUMBER = ("idx", "index", "layer_id", "layer_number", "num_layers", "num_hidden_layers")
"""Substrings of attribute names that number or count layers and do not describe their kind."""


def small_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, *, attention: str, seq_len: int, seed: int
) -> PreTrainedModel:
    """Create a model of class `kind` in float32 on the CPU, in training mode. torch's global random state is not changed.

    Args:
        kind: class of a causal LM, of transformers or of the model's own code.
        config: configuration of the model at its full size.
        attention: name of the attention implementation.
        seq_len: see `shrink_config`.
        seed: seed of the weights.

    Raises:
        Exception: any error of the architecture's code.
    """
    small = shrink_config(config, seq_len=seq_len)
    remove_noise(small)
    small.use_cache = False
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        with torch.device("meta"):
            whole = _build_model(kind, small, attention)
        model = _build_model(kind, _cut_layers(small, whole), attention)
        if any(
            _layer_kind(cut) != _layer_kind(layer)
            for cut, layer in zip(decoder_layers(model), decoder_layers(whole), strict=False)
        ):
            # The kind of a layer depends on the number of layers.
            model = _build_model(kind, small, attention)
        _randomize_weights(model)
    return model.train()


def _build_model(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    return kind._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention)


def _cut_layers(config: PreTrainedConfig, whole: object) -> PreTrainedConfig:
    """Reduce the configuration to the smallest number of first layers that contains every kind of layer."""
    kinds = _layer_kinds(whole)
    depth = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    depth = min(max(depth, _LEAST_LAYERS), len(kinds))
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(kinds):
            setattr(text, name, value[:depth])
    if text.num_hidden_layers != depth:
        text.num_hidden_layers = depth
    return cut


def _layer_kinds(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Describe each decoder layer: classes, shapes and settings of its modules, and its entries in the configuration's lists."""
    layers = decoder_layers(model)
    lists = [value for value in vars(model.config.get_text_config()).values() if _describes_layers(value, len(layers))]
    return [(_layer_kind(layer), tuple(str(values[i]) for values in lists)) for i, layer in enumerate(layers)]


def _describes_layers(value: object, layers: int) -> bool:
    """Return whether a value is a list with one entry per layer, and not a list of layer numbers."""
    if not isinstance(value, list | tuple) or len(value) != layers:
        return False
    return not all(isinstance(entry, int) for entry in value) or len({*value}) < layers


def _layer_kind(layer: nn.Module) -> tuple[object, ...]:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(sorted((key, value) for key, value in vars(module).items() if _tells_kind(key, value))),
            tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _tells_kind(name: str, value: object) -> bool:
    return isinstance(value, bool | int | str) and name[0] != "_" and not any(part in name for part in _NUMBER)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _randomize_weights(model: nn.Module) -> None:
    """Initialize matrices so that activations stay near 1, and add noise to vectors (norms, biases, sinks), so that no parameter is
    neutral.
    """
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, _GAIN / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers."""
    before, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shows:
            logging.enable_progress_bar()
