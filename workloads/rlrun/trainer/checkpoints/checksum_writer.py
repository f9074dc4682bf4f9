"""DCP's writer to files with size and checksum of the written bytes, so that no shard is read again for its manifest entry."""

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
    """A writer of one rank's files, each fsynced before it is closed.

    Args:
        folder: that they are written to.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs = _CheckedFiles()

    def entries(self, checkpoint: Path) -> list[FileEntry]:
        """The files that this writer has written, with paths relative to `checkpoint`."""
        written = sorted(self.fs.written.items())
        return [FileEntry(str(path.relative_to(checkpoint)), one.size, one.crc32) for path, one in written]


class _CheckedFiles(FileSystem):  # type: ignore[misc]
    def __init__(self) -> None:
        self.written: dict[Path, _CheckedStream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[object]:
        if mode != "wb":
            raise ValueError(f"a checkpoint's files are written from their start, not opened with mode {mode!r}")
        with Path(path).open(mode) as file:
            stream = _CheckedStream(file)
            yield stream
            self.written[Path(path)] = stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path)] = self.written.pop(Path(path))


class _CheckedStream(io.BufferedIOBase):
    """A file that is written from start to end: it cannot be sought, so the checksum is that of the whole."""

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
