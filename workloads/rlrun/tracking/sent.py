"""The marks of what a tracker was sent, in order: `tracking/<tracker>.sent` on the volume.

A record's mark is written before the record is sent, as `step attempt`; that the first `n` are out of this machine's hands, or in files
that are durable, afterwards as `= n`. So after any kill it is known what may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlrun.protocol.files.durable import make_folder, write_bytes
from rlrun.tracking.record import Mark


class Sent:
    """The journal of one tracker; its one writer is the tracker's worker.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.marks, self.confirmed = read_sent(path)

    def cut(self, kept: int) -> None:
        """Forget all but the first `kept` records, which are confirmed, and a torn last line."""
        del self.marks[kept:]
        self.confirmed = len(self.marks)
        write_bytes(self._path, ("".join(map(_sent_line, self.marks)) + f"= {self.confirmed}\n").encode())

    def add(self, marks: Sequence[Mark]) -> None:
        """Note records that are about to be sent, durable."""
        self._append("".join(map(_sent_line, marks)))
        self.marks += marks

    def confirm(self) -> None:
        """Note that all records so far are out of this process's hands."""
        self.confirmed = len(self.marks)
        self._append(f"= {self.confirmed}\n")

    def _append(self, text: str) -> None:
        make_folder(self._path.parent)
        with self._path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


def _sent_line(mark: Mark) -> str:
    return f"{mark.step} {mark.attempt}\n"


def read_sent(path: Path) -> tuple[list[Mark], int]:
    """Marks of a journal in order, and how many of them are confirmed; the first line that is not whole ends it."""
    marks: list[Mark] = []
    confirmed = 0
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return marks, confirmed
    for line in text.splitlines(keepends=True):
        words = line.split()
        if not line.endswith("\n") or len(words) != 2 or not words[1].isdecimal():
            break
        if words[0] == "=":
            confirmed = min(int(words[1]), len(marks))
        elif words[0].isdecimal():
            marks.append(Mark(int(words[0]), int(words[1])))
        else:
            break
    return marks, confirmed
