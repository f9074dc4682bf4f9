"""Files of torch's distributed checkpoint (DCP): written with checksums, and read without executing anything.

The writer computes sizes and checksums during the write, so that shards are not read again for the manifest.

The reader is for untrusted files: it executes nothing from a checkpoint and reads nothing outside of its folder. DCP stores its table as a
pickle, and each value that is not a tensor as a pickle too. The reader loads the table with an allow-list of classes and the values with
`torch.load(weights_only=True)`, and compares the table with the files before it reads tensors.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
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

from rlrun.protocol.files.checkpoint_manifest import FileEntry
from rlrun.protocol.files.failures import RoleError, refusal_number
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls


class ChecksumWriter(dcp.FileSystemWriter):  # type: ignore[misc]  # torch is not type-checked
    """Writer of one rank's files; each file is fsynced before it is closed.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs = _CheckedFiles()

    def file_entries(self, checkpoint: Path) -> list[FileEntry]:
        """Return the written files, with paths relative to `checkpoint`."""
        written = sorted(self.fs.written.items())
        return [FileEntry(str(path.relative_to(checkpoint)), one.size, one.crc32) for path, one in written]


class _CheckedFiles(FileSystem):  # type: ignore[misc]
    def __init__(self) -> None:
        self.written: dict[Path, _CheckedStream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[object]:
        if mode != "wb":
            raise ValueError(f"files of a checkpoint must be opened with mode 'wb', got {mode!r}")
        with Path(path).open(mode) as file:
            stream = _CheckedStream(file)
            yield stream
            self.written[Path(path)] = stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path)] = self.written.pop(Path(path))


class _CheckedStream(io.BufferedIOBase):
    """File that is written sequentially. It is not seekable, so the checksum covers the complete content."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = self.crc32 = 0

    def write(self, content: Any) -> int:
        self.size += memoryview(content).nbytes
        self.crc32 = zlib.crc32(content, self.crc32)
        written: int = self._file.write(content)
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        number: int = self._file.fileno()
        return number

    def close(self) -> None:
        self._file.close()


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
"""Allowed classes of a checkpoint's table. They only store values, so calling them has no side effects."""
_FILE = re.compile(r"__\d+_\d+\.distcp")
"""Names of the ranks' files in DCP."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # Python 3.11.0 to 3.11.3 pickle members of enumerations with it
            return _read_member
        if name == "PosixPath" and module in ("pathlib", "pathlib._local"):  # the second name is used by Python 3.13
            return PosixPath
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it references {module}.{name}, which is not allowed in checkpoints")
        return super().find_class(module, name)


def _read_member(kind: Any, name: Any) -> Any:
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it references builtins.getattr, which is not allowed in checkpoints")
    return _MEM_FORMAT_ENCODING[name]


class CheckpointReader(dcp.FileSystemReader):  # type: ignore[misc]  # torch is not type-checked
    """Reader of the trainer's part of a checkpoint.

    Args:
        folder: folder with the files of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self) -> Metadata:
        """Read the table of contents of the checkpoint.

        The method omits the `**kwargs` of the base class, because with them torch reads per-rank tables after a failed read and reports
        an error about those instead.

        Raises:
            RoleError: the table is missing, contains a forbidden class, or does not match the files.
            OSError: the volume has a fault.
        """
        path = Path(self._get_metadata_path())
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            _check_table(metadata, self.folder)
        except OSError as error:
            # A fault of the volume, not damage, so it does not count as a failure of the run.
            if refusal_number(error) is not None:
                raise
            raise _refuse_table(path, error.strerror or str(error)) from None
        except Exception as error:  # the content of the file can cause any error
            raise _refuse_table(path, str(error) or type(error).__name__) from None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckpointPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Planner that loads values other than tensors without executing code."""

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        """Read one value.

        Raises:
            RoleError: the value is not plain data.
        """
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:
            raise _not_read(f"the checkpoint's {name}", error) from None
        plain = io.BytesIO()  # torch unpickles without restrictions, so it gets a copy written here
        torch.save(found, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_state(state: dict[str, Any], reader: CheckpointReader, *, alone: bool = False) -> None:
    """Load tensors and values of `state` in place; all ranks call it together.

    Args:
        state: nested state dict; its tensors have the shapes of the checkpoint's.
        reader: reader of the checkpoint.
        alone: load in one process without a process group.

    Raises:
        RoleError: the data of at least one rank is damaged or not allowed.
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
        # `CheckpointException` is not a subclass of `Exception` and would bypass handlers.
        raise RuntimeError(str(error)) from error


def _not_read(what: str, error: Exception) -> RoleError:
    named = re.search(r"GLOBAL (\S+)", str(error))  # the rest of torch's message recommends to execute the file
    why = f"it references {named[1]}, which is not allowed in checkpoints" if named else "it is not plain data"
    return RoleError(escape_controls(f"{what} is damaged, or was not written by RLRun: {why}"), exit_codes.DATA)


def _refuse_table(path: Path, why: str) -> RoleError:
    message = f"{path} is damaged, or was not written by RLRun: {why}; this checkpoint is not used"
    return RoleError(escape_controls(message), exit_codes.DATA)


def _check_table(metadata: Any, folder: Path) -> None:
    """Compare the table with the files.

    Raises:
        ValueError: they do not match.
    """
    if type(metadata) is not Metadata or type(metadata.storage_meta) is not StorageMeta:
        raise ValueError("it does not contain a table")
    entries, stored = metadata.state_dict_metadata, metadata.storage_data
    if type(entries) is not dict or type(stored) is not dict:
        raise ValueError("its table is not a dictionary")
    sizes, lengths = _file_sizes(folder), dict[tuple[str, Any], int]()
    for index, place in stored.items():
        if type(index) is not MetadataIndex or index.fqn not in entries:
            raise ValueError("it has a location for an unknown entry")
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
        raise ValueError(f"{name} is in {file!r}, which is not a file of the checkpoint")
    if not (type(offset) is type(length) is int and 0 <= offset <= offset + length <= sizes[file]):
        raise ValueError(f"{name} is at {offset!r}, {length!r} bytes, of {file}, which has {sizes[file]}")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{name} is transformed, which RLRun never does")


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
    # Tensors are stored uncompressed. A shape that needs more than the stored bytes is forged and would allocate memory.
    wanted = math.prod(entry.size) * entry.properties.dtype.itemsize
    there = sum(lengths[name, offset] for offset in offsets)
    if min(entry.size, default=0) < 0 or wanted > there:
        raise ValueError(f"{name} needs {wanted} bytes, but {there} are stored")
