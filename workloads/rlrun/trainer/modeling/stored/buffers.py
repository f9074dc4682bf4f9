"""Buffers that no file has: rotary frequencies, scales of embeddings, masks. The architecture's own code makes them again."""

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
"""Attribute of a tensor that transformers' functions leave as it is."""
_FILLINGS = (0, 1)
"""Values that a buffer has before it is made; where the result depends on them, it was not made."""


def make_buffers(model: PreTrainedModel, names: set[str]) -> None:
    """Give the buffers the values that they have in a new model.

    Args:
        model: with memory for all tensors, divided or not; its parameters are left alone.
        names: of buffers, whose values are undefined.

    Raises:
        RoleError: the architecture's code does not make one of them in `_init_weights`, so that transformers loads it undefined too.
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
                    f"{type(model).__name__} cannot be trained: its buffer {prefix}{name} is in no file, and its code does not make it "
                    "in _init_weights; make it there, or register it with persistent=True",
                    exit_codes.CONFIGURATION,
                )


def _buffer_maker(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Model whose code makes a module's buffers: the innermost one that it is in, as for the images of a model of text and images."""
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
