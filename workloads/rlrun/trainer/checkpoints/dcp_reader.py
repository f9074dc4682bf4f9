"""DCP's reader for files that others may have written: nothing in a checkpoint is executed, and nothing outside of it is read.

DCP keeps its table as a pickle, and values that are no tensors as one each. Here the table is read with an allow-list, the values as
`torch.load(weights_only=True)` does, and what the table says is held against the files before anything is taken from them.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from rlrun.protocol.files.failures import RoleError, refusal_number
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable

_DCP = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    }
    | {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)
"""All that a checkpoint's table is made of; none of these does anything when it is called but to hold values."""
_FILE = re.compile(r"__\d+_\d+\.distcp")
"""Names that DCP gives to the files of the ranks."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # by which Python 3.11.0 to 3.11.3 write the member of an enumeration
            return _read_member
        if name == "PosixPath" and module in ("pathlib", "pathlib._local"):  # the latter in Python 3.13
            return PosixPath
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint is made of")
        return super().find_class(module, name)


def _read_member(kind: Any, name: Any) -> Any:
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr, which no checkpoint is made of")
    return _MEM_FORMAT_ENCODING[name]


class CheckpointReader(dcp.FileSystemReader):  # type: ignore[misc]  # torch is not type-checked
    """Reader of the trainer's part of a checkpoint.

    Args:
        folder: that holds the files of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self) -> Metadata:
        """The table of all that the checkpoint holds.

        Without the `**kwargs` of the base class: with them torch replaces the error of a failed read by that of a table of one rank, which
        no checkpoint has.

        Raises:
            RoleError: it is missing, names what no checkpoint is made of, or does not go with the files.
            OSError: the volume fails to read it.
        """
        path = Path(self._get_metadata_path())
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            _check_table(metadata, self.folder)
        except OSError as error:
            if refusal_number(error) is not None:  # not damage: an end for this reason does not count against the run
                raise
            raise _refuse_table(path, error.strerror or str(error)) from None
        except Exception as error:  # of any kind: it is the file that chooses
            raise _refuse_table(path, str(error) or type(error).__name__) from None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckpointPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Takes values that are no tensors without executing anything."""

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        """Read one value.

        Raises:
            RoleError: it is not plain.
        """
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:
            raise _not_read(f"the checkpoint's {name}", error) from None
        plain = io.BytesIO()  # what torch unpickles without limits is what was written here
        torch.save(found, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_state(state: dict[str, Any], reader: CheckpointReader, *, alone: bool = False) -> None:
    """Fill the tensors and values of `state` in place; every rank takes part.

    Args:
        state: nested; its tensors' shapes are those that the checkpoint has.
        reader: of the checkpoint.
        alone: without a process group.

    Raises:
        RoleError: one rank at least finds what is not read.
    """
    try:
        dcp.load(state, storage_reader=reader, planner=CheckpointPlanner(), no_dist=alone)
    except CheckpointException as error:
        causes = [failure[0] for _, failure in sorted(error.failures.items())]
        for cause in causes:
            if isinstance(cause, RoleError):
                raise cause from None
            if isinstance(cause, pickle.UnpicklingError):
                raise _not_read(f"a tensor of {reader.folder}", cause) from None
        raise RuntimeError(str(error)) from error  # torch's own is no `Exception` and would pass every handler


def _not_read(what: str, error: Exception) -> RoleError:
    named = re.search(r"GLOBAL (\S+)", str(error))  # the rest of torch's text is advice to execute it
    why = f"it names {named[1]}, which no checkpoint is made of" if named else "it is no plain value"
    return RoleError(printable(f"{what} is damaged, or was not written by RLRun: {why}"), exit_codes.DATA)


def _refuse_table(path: Path, why: str) -> RoleError:
    message = f"{path} is damaged, or was not written by RLRun: {why}; nothing of this checkpoint is used"
    return RoleError(printable(message), exit_codes.DATA)


def _check_table(metadata: Any, folder: Path) -> None:
    """Hold the table against the files.

    Raises:
        ValueError: they do not go together.
    """
    if type(metadata) is not Metadata or type(metadata.storage_meta) is not StorageMeta:
        raise ValueError("it holds no table")
    entries, stored = metadata.state_dict_metadata, metadata.storage_data
    if type(entries) is not dict or type(stored) is not dict:
        raise ValueError("its table is none")
    sizes, lengths = _file_sizes(folder), dict[tuple[str, Any], int]()
    for index, place in stored.items():
        if type(index) is not MetadataIndex or index.fqn not in entries:
            raise ValueError("it has a place for what it does not hold")
        _check_place(index.fqn, place, sizes)
        lengths[index.fqn, index.offset] = place.length
    for name, entry in entries.items():
        _check_entry(name, entry, lengths)


def _file_sizes(folder: Path) -> Mapping[str, int]:
    files = (path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    return {path.name: path.stat().st_size for path in files if path.is_file() and not path.is_symlink()}


def _check_place(name: str, place: object, sizes: Mapping[str, int]) -> None:
    file, offset, length = (getattr(place, field, None) for field in ("relative_path", "offset", "length"))
    if type(file) is not str or file not in sizes:
        raise ValueError(f"{name} is in {file!r}, which is none of its files")
    if not (type(offset) is type(length) is int and 0 <= offset <= offset + length <= sizes[file]):
        raise ValueError(f"{name} is at {offset!r}, {length!r} bytes, of {file}, which has {sizes[file]}")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{name} is transformed, which no checkpoint of ours is")


def _check_entry(name: Any, entry: Any, lengths: Mapping[tuple[str, Any], int]) -> None:
    if type(name) is not str or type(entry) not in (BytesStorageMetadata, TensorStorageMetadata):
        raise ValueError(f"{name!r} is neither a tensor nor a value")
    offsets = [None] if type(entry) is BytesStorageMetadata else [chunk.offsets for chunk in entry.chunks]
    if missing := [offset for offset in offsets if (name, offset) not in lengths]:
        raise ValueError(f"{name} lacks a part ({missing[0]})")
    if type(entry) is BytesStorageMetadata:
        return
    if type(entry.properties) is not TensorProperties or type(entry.size) is not torch.Size:
        raise ValueError(f"{name} has no shape")
    # Tensors are stored as they are: a shape that needs more than its bytes is made up, and would take memory.
    wanted = math.prod(entry.size) * entry.properties.dtype.itemsize
    there = sum(lengths[name, offset] for offset in offsets)
    if min(entry.size, default=0) < 0 or wanted > there:
        raise ValueError(f"{name} would have {wanted} bytes, where {there} are stored")
