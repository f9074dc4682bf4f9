"""Buffers that are not in files: rotary frequencies, scales of embeddings, masks. The architecture's code recomputes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

_DONE = "_is_hf_initialized"
"""Attribute that protects a tensor from initialization by transformers."""
_FILLINGS = (0, 1)
"""Values of a buffer before its initialization; if the result depends on them, the buffer was not initialized."""


def make_buffers(model: PreTrainedModel, names: set[str]) -> None:
    """Initialize buffers with their values in a new model.

    Args:
        model: model with memory for all tensors, sharded or not; parameters are not changed.
        names: names of the undefined buffers.

    Raises:
        RoleError: `_init_weights` of the architecture does not initialize a buffer, so transformers would leave it undefined too.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [name for name, _ in module.named_buffers(recurse=False) if prefix + name in names]
        if not own:
            continue
        maker = _buffer_maker(model, path)
        first, second = (_make_module(maker, module, own, filling) for filling in _FILLINGS)
        for name in own:
            if not torch.equal(first[name], second[name]):
                raise RoleError(
                    f"{type(model).__name__} cannot be trained: its files lack the buffer {prefix}{name}, and its code does not "
                    "initialize it in _init_weights; initialize it there, or register it with persistent=True",
                    exit_codes.CONFIGURATION,
                )


def _buffer_maker(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost model that contains a module, such as the image model of a multimodal model; its code initializes the
    buffers.
    """
    found, module = model, model
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        found = module if isinstance(module, PreTrainedModel) else found
    return found


def _make_module(model: PreTrainedModel, module: nn.Module, names: list[str], filling: int) -> dict[str, Tensor]:
    for name in names:
        module.get_buffer(name).fill_(filling)
    others = [tensor for name, tensor in _own_buffers(module) if name not in names]
    with torch.no_grad(), _left_alone(others), guard_torch_init_functions():
        model._init_weights(module)
    return {name: module.get_buffer(name).clone() for name in names}


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


@contextmanager
def _left_alone(tensors: list[Tensor]) -> Iterator[None]:
    marked = [tensor for tensor in tensors if not getattr(tensor, _DONE, False)]
    for tensor in marked:
        setattr(tensor, _DONE, True)
    yield
    for tensor in marked:
        delattr(tensor, _DONE)
