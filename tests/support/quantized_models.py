"""Quantized repositories, made from plain ones by other code than the product's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the four-bit codes 0 to 7."""


def quantize_blocks(weight: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Return FP8 values and float32 scales of each block, in loops: another implementation than the tested one."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(0, rows, block[0]):
        for column in range(0, columns, block[1]):
            part = weight[row : row + block[0], column : column + block[1]]
            scale = part.abs().max() / 448
            scales[row // block[0], column // block[1]] = scale
            values[row : row + block[0], column : column + block[1]] = (part / scale).to(torch.float8_e4m3fn)
    return values, scales


def quantize_four_bits(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[..., R, G, 16]` and `[..., R, G]` of a tensor of E2M1 values times powers of two, one power per 32 numbers."""
    groups = matrix.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=2**-20).log2().floor() - 2).int()
    scaled = groups / torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).unsqueeze(-1)
    table = torch.tensor(E2M1)
    codes = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.unflatten(-1, (16, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_files(
    folder: Path, method: str, endings: tuple[str, ...], block: tuple[int, int] = (128, 128)
) -> list[str]:
    """Quantize tensors of a repository in place.

    Args:
        folder: plain repository with one file.
        method: fp8 or mxfp4.
        endings: endings of the names of the quantized tensors.
        block: block of FP8.

    Returns:
        Names of the quantized tensors.
    """
    tensors: dict[str, Tensor] = {}
    changed = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(endings):
            tensors[name] = tensor
            continue
        changed.append(name)
        if method == "fp8":
            values, scales = quantize_blocks(tensor.float(), block)
            tensors |= {name: values, f"{name}_scale_inv": scales}
        else:
            values, scales = quantize_four_bits(tensor.float().transpose(1, 2).contiguous())
            tensors |= {f"{name}_blocks": values, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content: dict[str, object] = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if method == "fp8":
        content |= {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": content}))
    return changed
