"""Recurrent mixers in packed rows: scans, linear attention and short convolutions, whose state crosses the sequences of a row.

A mixer of transformers has no boundaries between sequences. Its own `forward` therefore runs once per sequence of a row, and the results
are joined; attention, MLP, experts and head compute the whole row. The architecture check selects this (`Packing`) and proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rlrun.trainer.modeling.attention.packed_layout import Layout

Packing = Literal["row", "mixer", "alone"]
"""Rows of a model: `row` computes the whole row, `mixer` its mixers per sequence, and with `alone` each row is one sequence."""
PACKINGS: tuple[Packing, ...] = ("row", "mixer", "alone")
"""All levels, the cheapest first."""
MIXERS = (
    "GatedDeltaNet",
    "DeltaAttention",
    "ShortConv",
    "Mixer",
    "MambaLayer",
    "LightningAttention",
    "RecurrentBlock",
)
"""Ends of the class names of mixers. The architecture check detects a mixer with another name: its rows have packing `alone`."""
_PACKING, _ROW = "_rlrun_packing", "_rlrun_row"


class _CurrentRow:
    """Layout of the row that a model or one of its decoder layers computes; None before the first row."""

    def __init__(self) -> None:
        self.layout: Layout | None = None


def find_mixers(layer: nn.Module) -> list[nn.Module]:
    """Return the recurrent mixers of a decoder layer, without mixers inside of mixers."""
    found = [(name, module) for name, module in layer.named_modules() if type(module).__name__.endswith(MIXERS)]
    names = [name for name, _ in found if name]
    return [module for name, module in found if name and not any(name.startswith(f"{outer}.") for outer in names)]


def divide_mixers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Make the mixers of decoder layers compute each sequence of a row separately, in place.

    The layer's `forward` stores the row's layout for its own mixers. Call this before activation checkpointing, which recomputes the
    layer's `forward`: each recomputation then stores the layout of its own row, also if other rows have been computed in between.

    Args:
        layers: decoder layers, not sharded or compiled yet.

    Returns:
        The changed mixers.
    """
    changed: list[nn.Module] = []
    for layer in layers:
        mixers, row = find_mixers(layer), _CurrentRow()
        for mixer in mixers:
            # The lengths of a row are Python numbers: traced, they would make the compiler build a graph for each set of lengths.
            mixer.forward = torch.compiler.disable(partial(_mix_sequences, mixer.forward, row))
        if mixers:
            layer.forward = partial(_store_row, layer.forward, row)
        changed += mixers
    return changed


def pass_rows(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Pass the layout of a model's row to its layers with divided mixers, in place, because Mamba's models do not.

    Call this after activation checkpointing, which keeps the arguments of a layer for its recomputation.
    """
    row = _CurrentRow()
    setattr(model, _ROW, row)
    for layer in layers:
        if find_mixers(layer):
            layer.forward = partial(_pass_row, layer.forward, row)


def start_row(model: nn.Module, layout: Layout) -> None:
    """Store the layout of the next row for `pass_rows`.

    Raises:
        ValueError: the row has several sequences, but the model has packing `alone`.
    """
    if packing_of(model) == "alone" and len(layout.lengths) > 1:
        raise ValueError(
            f"a row has {len(layout.lengths)} sequences, but sequences of {type(model).__name__} influence each other"
        )
    row: _CurrentRow | None = getattr(model, _ROW, None)
    if row is not None:
        row.layout = layout


def set_packing(model: nn.Module, packing: Packing) -> None:
    """Store how rows of a model are packed; call it before `packed_attention.set_kernel` and `shard_model`."""
    setattr(model, _PACKING, packing)


def packing_of(model: nn.Module) -> Packing:
    """Return how rows of a model are packed: `row` for a model without an architecture check."""
    found: Packing = getattr(model, _PACKING, "row")
    return found


def strictest_packing(models: Iterable[nn.Module]) -> Packing:
    """Return the packing of rows that several models compute, such as a policy and its reference."""
    return max(map(packing_of, models), key=PACKINGS.index, default="row")


def _pass_row(forward: Any, row: _CurrentRow, *inputs: object, **keywords: object) -> object:
    return forward(*inputs, **keywords, **{_ROW: row.layout})


def _store_row(forward: Any, row: _CurrentRow, *inputs: object, **keywords: Any) -> object:
    row.layout = keywords.pop(_ROW)
    return forward(*inputs, **keywords)


def _mix_sequences(forward: Any, row: _CurrentRow, *inputs: object, **keywords: object) -> object:
    """Run a mixer's `forward` once per sequence of the row, and join the results."""
    if row.layout is None or len(row.layout.lengths) == 1:
        return forward(*inputs, **keywords)
    lengths = row.layout.lengths
    tokens = sum(lengths)
    hidden: Any = next(value for value in (*inputs, *keywords.values()) if isinstance(value, Tensor))
    if hidden.shape[1] != tokens:
        raise ValueError(f"a recurrent mixer computes {hidden.shape[1]} tokens of a row of {tokens}")
    parts, start = [], 0
    for length in lengths:
        span = slice(start, start + length)
        own = {name: _cut_sequence(value, span, tokens) for name, value in keywords.items()}
        parts.append(forward(*(_cut_sequence(value, span, tokens) for value in inputs), **own))
        start += length
    return _join_sequences(parts, lengths)


def _cut_sequence(value: object, span: slice, tokens: int) -> object:
    """Return the part of one sequence of an argument: tensors `[1, T, ...]`, and tuples of them such as rotary embeddings."""
    if isinstance(value, tuple):
        return tuple(_cut_sequence(entry, span, tokens) for entry in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, tokens):
        return value[:, span]
    return value


def _join_sequences(parts: Sequence[Any], lengths: Sequence[int]) -> object:
    """Join the outputs of the sequences. Decoder layers ignore other values of a mixer, such as its last state."""
    if isinstance(parts[0], tuple):
        return tuple(_join_sequences(values, lengths) for values in zip(*parts, strict=True))
    if all(
        isinstance(part, Tensor) and part.ndim > 1 and part.shape[1] == length
        for part, length in zip(parts, lengths, strict=True)
    ):
        return torch.cat(list(parts), dim=1)
    return parts[-1]
