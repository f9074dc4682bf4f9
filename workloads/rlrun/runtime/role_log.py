"""The log of a role: one line per message, whatever a message quotes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from loguru import logger

from rlrun.runtime.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from loguru import Record


def configure_log(sink: TextIO | Path, layout: str, *, level: str = "INFO") -> None:
    """Send the process's messages to one place.

    What a message quotes of others cannot look like a message of its own: further lines are indented.

    Args:
        sink: a stream, or a file.
        layout: loguru's format.
        level: the least that is logged.
    """
    logger.remove()
    logger.configure(patcher=_plain)
    logger.add(sink, format=layout, level=level, backtrace=False, diagnose=False)


def _plain(record: Record) -> None:
    record["message"] = printable(record["message"], lines=True).replace("\n", "\n    ")
