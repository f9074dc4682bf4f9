"""Logs of a role: one line per message, in files of bounded size on the run's volume.

A message that quotes several lines is still one line. The size is bounded for any amount of output.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from loguru import logger

from rlrun.runtime import redact
from rlrun.runtime.printable import escape_controls

if TYPE_CHECKING:
    from pathlib import Path

    from loguru import Record


ROLE_LOG_BYTES = 64 * 1024 * 1024
"""Maximum size of the log file of one role's process; with the earlier file, the volume has at most twice as much."""


def earlier_file(path: Path) -> Path:
    """Return the file with the content before the current one."""
    return path.with_name(path.name + ".1")


class BoundedLog:
    """Log file that replaces its `.1` file when it is full.

    Args:
        path: log file; created with its folder at the first chunk.
        max_bytes: size at which it is full.
    """

    def __init__(self, path: Path, max_bytes: int = ROLE_LOG_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._file: int | None = None
        self._lock = threading.Lock()

    def append(self, chunk: bytes) -> None:
        """Append a chunk; it is lost if the volume refuses the write.

        The file is opened at the first successful try and stays open: a deleted file is not created again at every chunk.
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
    """Copy a file to `.1` and empty it while another process appends to it; lines written in between are lost.

    Args:
        path: file that its writer opened with O_APPEND.
        max_bytes: size above which it is emptied.
    """
    with suppress(OSError):
        if path.stat().st_size > max_bytes:
            shutil.copyfile(path, earlier_file(path))
            os.truncate(path, 0)


def configure_log(sink: TextIO | Path, layout: str, *, level: str = "INFO") -> None:
    """Send the process's messages to one sink.

    Text that a message quotes cannot imitate another message: its further lines are indented. Secrets are removed.

    Args:
        sink: stream or file.
        layout: loguru's format.
        level: minimum level.
    """
    logger.remove()
    logger.configure(patcher=partial(_make_plain, redact.known_secrets(os.environ)))
    logger.add(sink, format=layout, level=level, backtrace=False, diagnose=False)


def _make_plain(known: list[str], record: Record) -> None:
    message = redact.redact_text(record["message"], known)
    record["message"] = escape_controls(message, lines=True).replace("\n", "\n    ")
