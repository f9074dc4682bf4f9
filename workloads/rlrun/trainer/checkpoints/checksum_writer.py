"""DCP file writer that computes sizes and checksums during the write, so that shards are not read again for the manifest."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from rlrun.protocol.files.checkpoint_manifest import FileEntry


class ChecksumWriter(dcp.FileSystemWriter):  # type: ignore[misc]  # torch is not type-checked
    """Writer of one rank's files; each file is fsynced before it is closed.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs = _CheckedFiles()

    def entries(self, checkpoint: Path) -> list[FileEntry]:
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
