"""Files of a model's weights: names of tensors, and reads of slices. A file is never read completely."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rlrun.trainer.modeling.stored.lazy import Lazy, Slices

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a single file, and of the index of several files. Pickles (`pytorch_model.bin`) are refused by `rlrun.hub.pickled`."""


class Files:
    """Tensors in a model's files.

    Args:
        where: file of each tensor, by name.
    """

    def __init__(self, where: Mapping[str, Path]) -> None:
        self.where = where
        self.bytes_read = 0
        """Total bytes of all read slices, in the number format of the files."""
        self.largest_read = 0
        """Bytes of the largest read slice."""

    def tensor(self, name: str) -> Lazy:
        """Return a lazy tensor by its name in the files."""
        return Lazy(self._shape(name), lambda slices: self._read(name, slices))

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.where[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def _read(self, name: str, slices: Slices) -> Tensor:
        with safe_open(self.where[name], framework="pt") as file:
            found = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        size = found.numel() * found.element_size()
        self.bytes_read += size
        self.largest_read = max(self.largest_read, size)
        return found


def stored_names(source: str, options: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the tensors in a model's files without reading values, or None if the model has no files.

    Args:
        source: folder or name on the hub.
        options: options of the hub, such as the revision.
    """
    if (path := _optional_file(source, _INDEX, options)) is not None:
        return list(_weight_map(path))
    if (path := _optional_file(source, _SINGLE, options)) is None:
        return None
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def open_files(source: str, options: Mapping[str, Any], names: list[str]) -> Files:
    """Open the files of the tensors from `stored_names`, and download them if the source is on the hub."""
    if (path := _optional_file(source, _INDEX, options)) is not None:
        paths, _ = get_checkpoint_shard_files(source, str(path), **options)
        by_name = {Path(one).name: Path(one) for one in paths}
        return Files({name: by_name[file] for name, file in _weight_map(path).items()})
    if (path := _optional_file(source, _SINGLE, options)) is not None:
        return Files(dict.fromkeys(names, path))
    raise FileNotFoundError(f"{source} has no safetensors files")


def _optional_file(source: str, name: str, options: Mapping[str, Any]) -> Path | None:
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if found is None else Path(found)


def _weight_map(index: Path) -> Mapping[str, str]:
    return dict(json.loads(index.read_text())["weight_map"])
