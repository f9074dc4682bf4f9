"""Reads that stay inside the given folders, even if the folders contain links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_LOOKED_INTO = ("attempts", "checkpoints", "logs", "revisions")
"""Folders of a run whose files the readers of `rlrun.inspect` open directly."""
_DEPTH = 3
"""Depth below these folders that is checked, as in `logs/attempt_0001/trainer/error.json`."""


class OutsideError(Exception):
    """Error for a file outside of the given folders, or one that is not a regular file."""


class Fence:
    """Folders that may be read.

    Args:
        folders: folders from the user; links in their own paths are resolved once, here.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._real = tuple(folder.resolve() for folder in folders)

    def contains_path(self, path: Path) -> bool:
        """Return whether a path is in one of the folders after all links are resolved."""
        return self._is_inside(path.resolve())

    def _is_inside(self, real: Path) -> bool:
        return any(real.is_relative_to(folder) for folder in self._real)

    def check_run(self, root: Path) -> None:
        """Refuse a run's folder if it contains a link to the outside, a pipe or a device.

        The readers of `rlrun.inspect` open small files directly, so these files are checked before.

        Raises:
            OutsideError: an entry is not allowed; the message contains its name.
        """
        if not self.contains_path(root):
            raise OutsideError(f"{root.name} is a link to a folder outside of the folders of this page")
        for entry in _allowed_entries(root):
            self._check_entry(entry, root)

    def _check_entry(self, entry: os.DirEntry[str], root: Path) -> None:
        name = Path(entry.path).relative_to(root)
        if entry.is_symlink() and not self._is_inside(Path(entry.path).resolve()):
            raise OutsideError(f"{root.name}/{name} is a link to a target outside of the folders of this page")
        if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
            raise OutsideError(f"{root.name}/{name} is neither a file nor a folder")

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading. The location is checked on the opened file, so a concurrent change of a link cannot bypass the check.

        Raises:
            OutsideError: the file is outside of the folders, or is not a regular file.
            FileNotFoundError: the file does not exist.
        """
        number = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # O_NONBLOCK: opening a pipe without a writer would block forever
        file = os.fdopen(number, "rb")
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OutsideError(f"{path.name} is not a regular file")
            if not self._is_inside(_opened_path(number, path)):
                raise OutsideError(f"{path.name} is outside of the folders of this page")
        except BaseException:
            file.close()
            raise
        return file


def _opened_path(number: int, path: Path) -> Path:
    """Return the path of an open file."""
    try:
        return Path(f"/proc/self/fd/{number}").readlink()
    except OSError:  # not Linux
        return path.resolve()


def _allowed_entries(root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a run's folder that are checked: direct entries, and those of folders that are read completely."""
    with os.scandir(root) as found:
        for entry in sorted(found, key=lambda one: one.name):
            yield entry
            if entry.name in _LOOKED_INTO and entry.is_dir():
                yield from _is_below(entry.path, _DEPTH)


def _is_below(folder: str, depth: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        for entry in found:
            yield entry
            if depth > 1 and entry.is_dir(follow_symlinks=False):
                yield from _is_below(entry.path, depth - 1)
