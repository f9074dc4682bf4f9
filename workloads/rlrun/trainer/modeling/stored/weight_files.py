"""Safetensors of a model, read by slices; a file is never read completely. Quantized tensors are read as float32.

Pickles (`pytorch_model.bin`) are refused by `rlrun.hub.refused_models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rlrun.config.quantization import Quantization, read_quantization
from rlrun.hub.folder_weights import INDEX, SINGLE
from rlrun.trainer.modeling.stored.quantized import dequantize, plain_names, quantized_tensors
from rlrun.trainer.modeling.stored.stored_tensors import Lazy, Slices


class Files:
    """Tensors in a model's files.

    Args:
        where: file of each tensor, by its name in the files.
        quantization: format of the files, if they are quantized.
    """

    def __init__(self, where: Mapping[str, Path], quantization: Quantization | None = None) -> None:
        self._paths = where
        self._quantization = quantization
        self._shapes: dict[Path, dict[str, tuple[int, ...]]] = {}
        self._quantized = {} if quantization is None else quantized_tensors(where, quantization)
        names = list(where) if quantization is None else plain_names(where, quantization)
        self.where: Mapping[str, Path] = {name: where[self._stored_name(name)] for name in names}
        """File of each tensor by its name without quantization, as the model's code expects it."""
        self.bytes_read = 0
        """Total bytes of all read slices, in the number format of the files."""
        self.largest_read = 0
        """Bytes of the largest read slice."""

    def lazy_tensor(self, name: str) -> Lazy:
        """Return a lazy tensor by its name without quantization.

        Raises:
            ValueError: the shapes of a quantized tensor and of its scales do not fit together; the message has its name.
        """
        if self._quantization is None or name not in self._quantized:
            return self._stored(name)
        pair = self._quantized[name]
        try:
            return dequantize(self._stored(pair.values), self._stored(pair.scales), self._quantization)
        except ValueError as error:
            raise ValueError(f"{pair.values} in {self._paths[pair.values].name}: {error}") from None

    def _stored_name(self, name: str) -> str:
        return self._quantized[name].values if name in self._quantized else name

    def _stored(self, name: str) -> Lazy:
        return Lazy(self._tensor_shape(name), lambda slices: self._read_slices(name, slices))

    def _tensor_shape(self, name: str) -> tuple[int, ...]:
        path = self._paths[name]
        if path not in self._shapes:  # opening a file parses its header with all tensors
            with safe_open(path, framework="pt") as file:
                self._shapes[path] = {one: tuple(file.get_slice(one).get_shape()) for one in list(file.keys())}
        if name not in self._shapes[path]:
            raise ValueError(f"{path.name} does not contain {name}")
        return self._shapes[path][name]

    def _read_slices(self, name: str, slices: Slices) -> Tensor:
        with safe_open(self._paths[name], framework="pt") as file:
            found = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        size = found.numel() * found.element_size()
        self.bytes_read += size
        self.largest_read = max(self.largest_read, size)
        return found


def stored_names(source: str, options: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the tensors in a model's files without reading values, or None if the model has no files.

    The tensors of a quantized repository have their names without quantization.

    Args:
        source: folder or name on the hub.
        options: options of the hub, such as the revision.
    """
    if (path := _optional_file(source, INDEX, options)) is not None:
        names = list(_weight_map(path))
    elif (path := _optional_file(source, SINGLE, options)) is not None:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    else:
        return None
    quantization = _quantization(source, options)
    return names if quantization is None else plain_names(names, quantization)


def open_files(source: str, options: Mapping[str, Any]) -> Files:
    """Open the files of a model, and download them if the source is on the hub."""
    quantization = _quantization(source, options)
    if (path := _optional_file(source, INDEX, options)) is not None:
        paths, _ = get_checkpoint_shard_files(source, str(path), **options)
        by_name = {Path(one).name: Path(one) for one in paths}
        return Files({name: by_name[file] for name, file in _weight_map(path).items()}, quantization)
    if (path := _optional_file(source, SINGLE, options)) is not None:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        if not names:  # `Files` without tensors means parameters without values
            raise ValueError(f"{path.name} has no tensors")
        return Files(dict.fromkeys(names, path), quantization)
    raise FileNotFoundError(f"{source} has no safetensors files")


def _quantization(source: str, options: Mapping[str, Any]) -> Quantization | None:
    path = _optional_file(source, "config.json", options)
    return None if path is None else read_quantization(json.loads(path.read_bytes()))


def _optional_file(source: str, name: str, options: Mapping[str, Any]) -> Path | None:
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if found is None else Path(found)


def _weight_map(index: Path) -> Mapping[str, str]:
    return dict(json.loads(index.read_text())["weight_map"])
