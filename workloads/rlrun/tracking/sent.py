"""Journal of the records that a tracker was sent: `tracking/<tracker>.sent` on the volume.

The mark of a record is written as `step attempt` before the record is sent. After the first `n` records have left this machine, or are in
durable files, a line `= n` is added. Therefore it is known after any kill which records may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlrun.protocol.files.durable import make_folder, write_bytes
from rlrun.tracking.record import Mark


class Sent:
    """Journal of one tracker. Only the tracker's worker writes it.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.marks, self.confirmed = read_sent(path)

    def cut(self, kept: int) -> None:
        """Keep only the first `kept` records, which are confirmed. A torn last line is removed, too."""
        del self.marks[kept:]
        self.confirmed = len(self.marks)
        write_bytes(self._path, ("".join(map(_sent_line, self.marks)) + f"= {self.confirmed}\n").encode())

    def add(self, marks: Sequence[Mark]) -> None:
        """Write the marks of records that will be sent next. The file is durable afterwards."""
        self._append("".join(map(_sent_line, marks)))
        self.marks += marks

    def confirm(self) -> None:
        """Record that all records so far have left this process."""
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
    """Return the marks of a journal in order, and the number of confirmed ones. Reading stops at the first incomplete line."""
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
