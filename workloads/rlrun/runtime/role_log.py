"""Log of a role: one line per message, even if a message quotes several lines."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, TextIO

from loguru import logger

from rlrun.runtime import redact
from rlrun.runtime.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from loguru import Record


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
    record["message"] = printable(message, lines=True).replace("\n", "\n    ")
