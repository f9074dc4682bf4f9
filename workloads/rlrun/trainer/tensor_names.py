"""How tensors are called in files, where `transformers` keeps them differently in memory: a mixture's experts.

In memory all experts of a layer are one tensor, `...experts.gate_up_proj [E, 2 I, D]` (gate's rows first) and `...experts.down_proj
[E, D, I]`. Files of the Qwen mixtures, which vLLM loads, have three matrices for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_PARTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}


def expert_parts(name: str) -> tuple[str, tuple[str, ...]] | None:
    """`(prefix, matrices)` of a tensor of all experts: matrix m of expert e is `prefix.e.m.weight`; None for any other name."""
    for ending, matrices in _PARTS.items():
        if name.endswith(ending):
            return name[: name.rindex(".")], matrices
    return None


def file_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """The names in files of a tensor of that shape, in the order of `file_tensors`."""
    parts = expert_parts(name)
    if parts is None:
        return [name]
    prefix, matrices = parts
    return [f"{prefix}.{expert}.{matrix}.weight" for expert in range(shape[0]) for matrix in matrices]


def file_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors in files of one in memory, by name; views where they can be."""
    parts = expert_parts(name)
    names = iter(file_names(name, tuple(tensor.shape)))
    if parts is None:
        yield next(names), tensor
        return
    for expert in tensor.unbind():
        for matrix in expert.chunk(len(parts[1])):
            yield next(names), matrix
