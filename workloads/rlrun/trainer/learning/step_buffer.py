"""All rows of a step on the device by one copy out of one buffer, which is pinned where there is a GPU.

Whatever depends on lengths and masks alone is made of numpy arrays on the host, where the samples are: the device is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlrun.protocol.files.batch import Sample
from rlrun.trainer.modeling.packed_attention import Layout, row_layout

_ALIGNMENT = 16
"""Bytes at whose multiples the arrays start."""
_IDLE_TOKENS = 2
"""Length of the row that a rank without work runs, so that it takes part in every collective."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed row. Tensors are `[T]` unless stated; position `j` belongs to token `j` given those before it."""

    input_ids: Tensor
    position_ids: Tensor
    """Restart at 0 with every sequence."""
    mask: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    versions: Tensor
    """Policy version that sampled the token; -1 outside the mask."""
    temperatures: Tensor
    packed: Layout
    predicted: Tensor
    """`[N]` int64: where the mask is true."""
    sequence_ids: Tensor
    """Number of the token's sequence in the row, int64."""


Columns = dict[str, npt.NDArray[np.generic]]


def micro_batch(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Put samples end to end; none of them gives a row without a loss token."""
    return micro_batches([samples], device)[0]


def micro_batches(rows: Sequence[Sequence[Sample]], device: torch.device) -> list[MicroBatch]:
    """A row of each of the lists of samples, all of them by one copy to the device."""
    lengths = [[len(sample) for sample in samples] or [_IDLE_TOKENS] for samples in rows]
    columns = [
        _row_columns(samples, own) if samples else _idle_columns() for samples, own in zip(rows, lengths, strict=True)
    ]
    found = _copy_to_device([array for row in columns for array in row.values()], device)
    return [_make_row(row, found, own, device) for row, own in zip(columns, lengths, strict=True)]


def _make_row(columns: Columns, found: Iterator[Tensor], lengths: Sequence[int], device: torch.device) -> MicroBatch:
    tensors = {name: next(found) for name in columns}
    boundaries = tensors.pop("boundaries")
    return MicroBatch(**tensors, packed=row_layout(lengths, device, boundaries=boundaries))


def _row_columns(samples: Sequence[Sample], lengths: Sequence[int]) -> Columns:
    """Arrays of one row, by the name of the tensor."""

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
    """Arrays of a row that nothing is learned from."""
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
    """The arrays as tensors on the device, in their order: views of one buffer.

    The host goes on while the copy runs. torch's allocator of pinned memory gives the buffer to nobody else until it is done.
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
