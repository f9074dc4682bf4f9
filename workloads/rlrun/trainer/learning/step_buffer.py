"""Copy of all rows of a step to the device in one buffer, which is pinned for a GPU.

Everything that depends only on lengths and masks is computed with numpy on the host, so the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlrun.protocol.files.batch import Sample
from rlrun.protocol.files.routes import join_columns
from rlrun.trainer.modeling.packed_attention import Layout, row_layout

_ALIGNMENT = 16
"""Alignment of the arrays in the buffer, in bytes."""
_IDLE_TOKENS = 2
"""Length of the dummy row of a rank without samples, which runs it to take part in all collectives."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed row. Tensors are `[T]` unless stated otherwise; values at `j` belong to token `j` given the tokens before it."""

    input_ids: Tensor
    position_ids: Tensor
    """Position in the sequence, starting from 0."""
    mask: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    versions: Tensor
    """Policy version that sampled the token; -1 outside the mask."""
    temperatures: Tensor
    packed: Layout
    predicted: Tensor
    """Positions of the loss tokens, `[N]` int64."""
    sequence_ids: Tensor
    """Index of the token's sequence in the row, int64."""
    routes: Tensor | None = None
    """Experts of each token, `[T, L, K]` uint8 or uint16; each pass copies routes in host memory to the device. Default: native choice."""
    routes_divided: bool = False
    """Whether `routes` contains only the tokens of this rank's part of the row, `[P, L, K]`, as recorded by an earlier pass."""


Columns = dict[str, npt.NDArray[np.generic]]


def micro_batch(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Concatenate samples to one row; an empty list results in a row without loss tokens."""
    return micro_batches([samples], device)[0]


def micro_batches(
    rows: Sequence[Sequence[Sample]], device: torch.device, *, with_routes: bool = False
) -> list[MicroBatch]:
    """Build one row from each list of samples, with one copy to the device for all rows. `with_routes`: keep the routes of samples."""
    lengths = [[len(sample) for sample in samples] or [_IDLE_TOKENS] for samples in rows]
    columns = [
        _row_columns(samples, own) if samples else _idle_columns() for samples, own in zip(rows, lengths, strict=True)
    ]
    found = _copy_to_device([array for row in columns for array in row.values()], device)
    made = [_make_row(row, found, own, device) for row, own in zip(columns, lengths, strict=True)]
    if not with_routes:
        return made
    return [replace(row, routes=_row_routes(samples, device)) for row, samples in zip(made, rows, strict=True)]


def _row_routes(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """Concatenate the routes of samples in host memory. They have up to 30 times the bytes of all other columns."""
    joined = join_columns([sample.routes for sample in samples], [len(sample) for sample in samples])
    if joined is None:
        return None
    routes = torch.from_numpy(joined)
    return routes.pin_memory() if device.type == "cuda" else routes


def _make_row(columns: Columns, found: Iterator[Tensor], lengths: Sequence[int], device: torch.device) -> MicroBatch:
    tensors = {name: next(found) for name in columns}
    boundaries = tensors.pop("boundaries")
    return MicroBatch(**tensors, packed=row_layout(lengths, device, boundaries=boundaries))


def _row_columns(samples: Sequence[Sample], lengths: Sequence[int]) -> Columns:
    """Build the arrays of one row by names of the tensors."""

    def joined(name: str) -> npt.NDArray[np.generic]:
        return np.concatenate([getattr(sample, name) for sample in samples])

    mask = joined("loss_mask")
    temperatures = np.array([sample.temperature for sample in samples], np.float32)
    return {
        "input_ids": joined("input_ids").astype(np.int64),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "mask": mask,
        "predicted": np.flatnonzero(mask),
        "inference_logprobs": joined("logprobs"),
        "advantages": joined("advantages"),
        "versions": joined("versions"),
        "temperatures": np.repeat(temperatures, lengths),
        "sequence_ids": np.repeat(np.arange(len(lengths)), lengths),
        "boundaries": np.cumsum([0, *lengths]).astype(np.int32),
    }


def _idle_columns() -> Columns:
    """Build the arrays of the dummy row of a rank without samples."""
    zeros = np.zeros(_IDLE_TOKENS, np.float32)
    ids = np.zeros(_IDLE_TOKENS, np.int64)
    return {
        "input_ids": ids,
        "position_ids": np.arange(_IDLE_TOKENS),
        "mask": zeros.astype(np.bool_),
        "predicted": ids[:0],
        "inference_logprobs": zeros,
        "advantages": zeros,
        "versions": (ids - 1).astype(np.int32),
        "temperatures": zeros + 1,
        "sequence_ids": ids,
        "boundaries": np.array([0, _IDLE_TOKENS], np.int32),
    }


def _copy_to_device(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Iterator[Tensor]:
    """Copy the arrays to the device in one buffer and return views of it, in order.

    The copy is asynchronous. torch's allocator of pinned memory does not reuse the host buffer before the copy has finished.
    """
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    bytes_ = buffer.numpy()
    for start, array in zip(starts, arrays, strict=False):
        bytes_[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = buffer.to(device, non_blocking=True)
    kinds = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return (
        there[start : start + array.nbytes].view(kind)
        for start, array, kind in zip(starts, arrays, kinds, strict=False)
    )
