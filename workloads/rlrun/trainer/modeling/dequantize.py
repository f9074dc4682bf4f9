"""Plain copy of a quantized model in the run's folder: the same tensors in `model.dtype`, without `quantization_config`.

Engines start from this copy, because the versions that the trainer publishes have plain tensors too, and an engine that starts from
quantized files computes its first tokens with other weights. The trainer loads the copy as well, so both start from equal numbers.
The copy is written from slices of the files, without a GPU and without the complete model in memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from loguru import logger
from safetensors.torch import save_file
from torch import Tensor

from rlrun.config.models.language_models import DType, ModelConfig
from rlrun.config.quantization import without_quantization
from rlrun.hub.fetch import model_source, needs_plain_copy
from rlrun.hub.repository import keep_revisions, show_source
from rlrun.protocol.files.durable import new_folder
from rlrun.protocol.files.failures import storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.shard import loading_errors
from rlrun.trainer.modeling.stored.stored_tensors import Lazy
from rlrun.trainer.modeling.stored.weight_files import Files, open_files

SHARD_BYTES = 4 * 1024**3
"""Largest size of a file, unless one tensor is larger."""
_CHUNK_NUMBERS = 2**26
"""Numbers that are converted at a time: 256 MiB in float32."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Endings of files that are not copied: they contain weights."""


def write_plain_copy(source: Path, folder: Path, dtype: DType, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a model without quantization. `folder` appears when it is durable and complete.

    Args:
        source: folder of the quantized model.
        folder: folder of the copy.
        dtype: number format of the copy. Tensors of whole numbers stay as they are.
        shard_bytes: largest size of a file.

    Returns:
        Bytes of all tensors.

    Raises:
        RoleError: the files are damaged or incomplete.
    """
    with new_folder(folder) as unfinished:
        with loading_errors(str(source)):
            files = open_files(str(source), {})
            weight_map: dict[str, str] = {}
            size = 0
            for number, shard in enumerate(_shards(files, dtype, shard_bytes), start=1):
                file = f"model-{number:05d}.safetensors"
                save_file(shard, unfinished / file, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(shard, file)
                size += sum(tensor.nbytes for tensor in shard.values())
                logger.info(
                    f"wrote {size / 2**30:.1f} GiB of the plain copy: {len(weight_map)} of {len(files.where)} tensors"
                )
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (unfinished / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
        _copy_small_files(source, unfinished, dtype)
    return size


def _shards(files: Files, dtype: DType, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the converted tensors of one file after the other, by name."""
    shard: dict[str, Tensor] = {}
    for name in files.where:
        tensor = _convert_tensor(files.lazy_tensor(name), getattr(torch, dtype))
        if shard and sum(one.nbytes for one in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard:
        yield shard


def _convert_tensor(stored: Lazy, number_format: torch.dtype) -> Tensor:
    """Read a tensor in parts along its first dimension: a layer's experts are gigabytes in float32."""
    if not stored.shape or 0 in stored.shape:
        return _cast(stored.read_all(), number_format)
    whole = stored.everything()
    rows = max(1, _CHUNK_NUMBERS * stored.shape[0] // math.prod(stored.shape))
    parts = (
        _cast(stored.read((slice(start, min(start + rows, stored.shape[0])), *whole[1:])), number_format)
        for start in range(0, stored.shape[0], rows)
    )
    first = next(parts)
    if rows >= stored.shape[0]:
        return first.contiguous()
    found = torch.empty(stored.shape, dtype=first.dtype)
    found[:rows] = first
    for number, part in enumerate(parts, start=1):
        found[number * rows : number * rows + len(part)] = part
    return found


def _cast(tensor: Tensor, number_format: torch.dtype) -> Tensor:
    return tensor.to(number_format) if tensor.is_floating_point() else tensor


def _copy_small_files(source: Path, folder: Path, dtype: DType) -> None:
    """Copy configuration, tokenizer and code; `config.json` loses the quantization."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in ("config.json", _INDEX):
            shutil.copyfile(file, folder / file.name)
    config = without_quantization(json.loads((source / "config.json").read_bytes()))
    config.pop("torch_dtype", None)  # older name of dtype
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")


def make_plain_copy(model: ModelConfig, paths: RunPaths, *, check: Callable[[str], None] | None = None) -> None:
    """Write the plain copy of the run's model, if its files are quantized and the copy does not exist.

    Args:
        model: the run's model.
        paths: paths of the run's folder.
        check: function that gets the folder of the quantized model before its weights are downloaded, and raises if it cannot be trained.

    Raises:
        RoleError: the model cannot be downloaded, read or trained, or the volume refuses the copy.
    """
    if paths.model.is_dir():
        return
    keep_revisions(paths)
    if not needs_plain_copy(model):
        return
    if check is not None:
        check(model_source(model, paths.model, with_weights=False, trained=True))
    source = Path(model_source(model, paths.model, with_weights=True, trained=True))
    logger.info(f"{show_source(str(source))} is quantized: writing a copy in {model.dtype} to {paths.model}")
    with storage_errors(paths.root, "write the plain copy of the quantized model"):
        write_plain_copy(source, paths.model, model.dtype)
