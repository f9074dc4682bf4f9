"""Reads that stay inside the given folders, whatever links lie in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_LOOKED_INTO = ("attempts", "checkpoints", "logs", "revisions")
"""Folders of a run whose files the readers of `rlrun.inspect` open by themselves."""
_DEPTH = 3
"""`logs/attempt_0001/trainer/error.json` lies so deep below them."""


class OutsideError(Exception):
    """A file lies outside the given folders, or is none that can be read to its end."""


class Fence:
    """The folders that may be read.

    Args:
        folders: as given by the user; links in their own paths are followed once, now.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._real = tuple(folder.resolve() for folder in folders)

    def holds(self, path: Path) -> bool:
        """True if a path, with all links followed, is in one of the folders."""
        return self._inside(path.resolve())

    def _inside(self, real: Path) -> bool:
        return any(real.is_relative_to(folder) for folder in self._real)

    def check_run(self, root: Path) -> None:
        """Refuse a run's folder from which a link leads out, or in which a pipe or a device stands for a file.

        The readers of `rlrun.inspect` open small files by themselves, so all of these are looked at before.

        Raises:
            OutsideError: names the entry.
        """
        if not self.holds(root):
            raise OutsideError(f"{root.name} is a link to a folder outside of those that were given")
        for entry in _allowed_entries(root):
            self._check(entry, root)

    def _check(self, entry: os.DirEntry[str], root: Path) -> None:
        name = Path(entry.path).relative_to(root)
        if entry.is_symlink() and not self._inside(Path(entry.path).resolve()):
            raise OutsideError(f"{root.name}/{name} is a link that leads out of the folders that were given")
        if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
            raise OutsideError(f"{root.name}/{name} is neither a file nor a folder")

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading. Where it lies is asked of what was opened, so no link that changes meanwhile gets past it.

        Raises:
            OutsideError: it lies outside, or is no file.
            FileNotFoundError: there is none.
        """
        number = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # a pipe without a writer would block for ever
        file = os.fdopen(number, "rb")
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OutsideError(f"{path.name} is no file")
            if not self._inside(_opened_path(number, path)):
                raise OutsideError(f"{path.name} lies outside of the folders that were given")
        except BaseException:
            file.close()
            raise
        return file


def _opened_path(number: int, path: Path) -> Path:
    """Place of an open file."""
    try:
        return Path(f"/proc/self/fd/{number}").readlink()
    except OSError:  # not Linux
        return path.resolve()


def _allowed_entries(root: Path) -> Iterator[os.DirEntry[str]]:
    """Entries of a run's folder that are looked at: its own, and those of the folders that are read as a whole."""
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
