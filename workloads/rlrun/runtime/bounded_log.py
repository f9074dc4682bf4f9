"""Log files on the run's volume whose size has a bound, whatever a role or an environment prints."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

ROLE_LOG_BYTES = 64 * 1024 * 1024
"""Size of the log of one role's process; twice as much lies on the volume at most."""


def earlier_file(path: Path) -> Path:
    """The file that holds what came before the present one."""
    return path.with_name(path.name + ".1")


class BoundedLog:
    """A file that is moved to `.1`, over the one that was there, when it is full.

    Args:
        path: the file, made with its folder at the first chunk.
        max_bytes: after which it is full.
    """

    def __init__(self, path: Path, max_bytes: int = ROLE_LOG_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._file: int | None = None
        self._lock = threading.Lock()

    def append(self, chunk: bytes) -> None:
        """Write at the end; where the volume takes nothing, the chunk is lost.

        The file is opened when it can be, and stays open: one may be deleted under a writer, not made again for each chunk.
        """
        with self._lock, suppress(OSError):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(self._file, chunk)
            if os.fstat(self._file).st_size > self._max_bytes:
                file, self._file = self._file, None
                os.close(file)
                self.path.replace(earlier_file(self.path))


def cut_back(path: Path, max_bytes: int = ROLE_LOG_BYTES) -> None:
    """Empty a file to which another process appends, after it was copied to `.1`; lines that come in between are lost.

    Args:
        path: opened by its writer with O_APPEND.
        max_bytes: after which it is emptied.
    """
    with suppress(OSError):
        if path.stat().st_size > max_bytes:
            shutil.copyfile(path, earlier_file(path))
            os.truncate(path, 0)
