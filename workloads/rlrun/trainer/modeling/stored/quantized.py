"""Quantized tensors in a model's files, read by slices as float32.

Two formats are read: FP8 with a scale per block of a matrix (DeepSeek V3, arXiv:2412.19437, section 3.3.2), and MXFP4 (OCP Microscaling
Formats 1.0: 32 numbers of four bits share one power of two). A slice of the result equals the same slice of the complete result bit for
bit, because each number depends only on its own scale.

The dequantizer of transformers is not used: it derives the block from the shapes, so it refuses or misreads matrices whose size is not a
multiple of the block (576 rows with 5 rows of scales; 160 rows with 2), and it needs the complete model in memory on each rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rlrun.config.quantization import Quantization
from rlrun.trainer.modeling.stored.stored_tensors import Lazy, Slices, transpose_tensor

SCALE_SUFFIX = "_scale_inv"
"""Suffix of the name of a tensor's scales in an FP8 repository. Despite its name, the scale multiplies."""
UNUSED_SUFFIXES = (".activation_scale", ".input_scale")
"""Scales of activations of engines that compute in FP8. Weights do not need them."""
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Suffixes of the two tensors of an MXFP4 matrix."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the four-bit codes 0 to 7; the codes 8 to 15 are their negatives."""
_NUMBERS = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=-1)
"""The two numbers of each byte, `[256, 2]`: the low half is the first."""
_GROUP = 32
"""Numbers that share one MXFP4 scale."""
_NOT_A_NUMBER = 255
"""Code of E8M0 that is not a number."""
_POWERS = torch.tensor([2.0 ** (code - 127) for code in range(_NOT_A_NUMBER)])
"""Values of E8M0 by code: a table is exact, the exponential functions of some processors are not."""


@dataclass(frozen=True)
class Stored:
    """Names in the files of one tensor's values and scales."""

    values: str
    scales: str


def quantized_tensors(names: Collection[str], quantization: Quantization) -> dict[str, Stored]:
    """Return the quantized tensors of a repository, by the name that the same tensor has in a repository without quantization.

    Args:
        names: names of the tensors in the files.
        quantization: format of the repository.
    """
    every = set(names)
    if quantization.method == "mxfp4":
        ends = [name.removesuffix(BLOCKS_SUFFIX) for name in every if name.endswith(BLOCKS_SUFFIX)]
        pairs = {name: Stored(name + BLOCKS_SUFFIX, name + SCALES_SUFFIX) for name in ends}
    else:
        ends = [name.removesuffix(SCALE_SUFFIX) for name in every if name.endswith(SCALE_SUFFIX)]
        pairs = {name: Stored(name, name + SCALE_SUFFIX) for name in ends}
    return {name: pair for name, pair in pairs.items() if {pair.values, pair.scales} <= every}


def plain_names(names: Collection[str], quantization: Quantization) -> list[str]:
    """Return the names of the tensors of a repository as if it were not quantized, in the order of its files.

    Args:
        names: names of the tensors in the files.
        quantization: format of the repository.
    """
    quantized = quantized_tensors(names, quantization)
    by_values = {stored.values: name for name, stored in quantized.items()}
    scales = {stored.scales for stored in quantized.values()}
    kept = (name for name in names if name not in scales and not name.endswith(UNUSED_SUFFIXES))
    return [by_values.get(name, name) for name in kept]


def dequantize(values: Lazy, scales: Lazy, quantization: Quantization) -> Lazy:
    """Return a tensor in float32 of its quantized values and their scales.

    Args:
        values: FP8 `[..., M, N]`, or four-bit pairs `[..., R, G, 16]` in uint8.
        scales: FP8: `[..., ceil(M / m), ceil(N / n)]` for blocks of m by n, or one number; float32, bfloat16 or E8M0. MXFP4: E8M0
            `[..., R, G]`.
        quantization: format of the repository.

    Returns:
        FP8: `[..., M, N]`. MXFP4: `[..., 32 G, R]`, as repositories without quantization have it.

    Raises:
        ValueError: the shapes of values and scales do not fit together.
    """
    if quantization.method == "mxfp4":
        return transpose_tensor(_four_bit_rows(values, scales), -1, -2)
    if quantization.block is None or scales.shape in ((), (1,)):
        return _scaled_tensor(values, scales)
    return _scaled_blocks(values, scales, quantization.block)


def _scaled_tensor(values: Lazy, scales: Lazy) -> Lazy:
    if scales.shape not in ((), (1,)):
        raise ValueError(
            f"the scales have shape {list(scales.shape)}, but without weight_block_size in config.json one number is expected"
        )
    return Lazy(values.shape, lambda slices: values.read(slices).float() * _read_scales(scales, scales.everything()))


def _scaled_blocks(values: Lazy, scales: Lazy, block: tuple[int, int]) -> Lazy:
    if len(values.shape) < 2:
        raise ValueError(
            f"a tensor of shape {list(values.shape)} has scales of shape {list(scales.shape)}, but is no matrix"
        )
    expected = (*values.shape[:-2], *(-(-size // step) for size, step in zip(values.shape[-2:], block, strict=True)))
    if scales.shape != expected:
        raise ValueError(
            f"the scales of a tensor of shape {list(values.shape)} have shape {list(scales.shape)}, but blocks of "
            f"{block[0]} x {block[1]} need {list(expected)}"
        )

    def read(slices: Slices) -> Tensor:
        covering = [
            slice(one.start // step, -(-one.stop // step)) for one, step in zip(slices[-2:], block, strict=True)
        ]
        found = _read_scales(scales, (*slices[:-2], *covering))
        # Index arithmetic instead of reshaping: the last block of a dimension may be smaller than the others.
        rows, columns = (
            torch.arange(one.start, one.stop) // step - blocks.start
            for one, step, blocks in zip(slices[-2:], block, covering, strict=True)
        )
        return values.read(slices).float() * found[..., rows, :][..., columns]

    return Lazy(values.shape, read)


def _four_bit_rows(values: Lazy, scales: Lazy) -> Lazy:
    """Return `[..., R, 32 G]` of four-bit pairs `[..., R, G, 16]`, low half first, and scales `[..., R, G]`."""
    *leading, groups, pairs = values.shape
    if pairs * 2 != _GROUP or scales.shape != (*leading, groups):
        raise ValueError(
            f"blocks of shape {list(values.shape)} and scales of shape {list(scales.shape)} are not MXFP4: 16 bytes and "
            "one scale for each 32 numbers are expected"
        )

    def read(slices: Slices) -> Tensor:
        last = slices[-1]
        covering = slice(last.start // _GROUP, -(-last.stop // _GROUP))
        codes = values.read((*slices[:-1], covering, slice(0, pairs)))
        numbers = embedding(codes.int(), _PAIRS).flatten(-2)  # one lookup per byte
        scaled = numbers.mul_(_read_scales(scales, (*slices[:-1], covering)).unsqueeze(-1))
        start = covering.start * _GROUP
        return scaled.flatten(-2)[..., last.start - start : last.stop - start]

    return Lazy((*leading, groups * _GROUP), read)


def _read_scales(scales: Lazy, slices: Slices) -> Tensor:
    """Read scales as float32. Exponents (E8M0) have no sign and no mantissa; files contain them in three dtypes."""
    found = scales.read(slices)
    if found.dtype == torch.uint8:
        if bool((found == _NOT_A_NUMBER).any()):
            raise ValueError(f"a scale is {_NOT_A_NUMBER}, which is not a number in E8M0; the files are damaged")
        return _POWERS[found.int()]
    found = found.float()
    if not bool(found.isfinite().all()):
        raise ValueError("a scale is not a finite number; the files are damaged")
    return found
