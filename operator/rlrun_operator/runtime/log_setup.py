"""Logging of the operator: one line per fact on stderr, plain or JSON. An error is one line with its cause and its place in the code."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path

from rlrun.runtime.printable import escape_controls
from rlrun_operator.settings import LogFormat


class _OneLine(logging.Formatter):
    """Formatter with time, level and message; it folds newlines and tracebacks into the line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_format_time(record)} {record.levelname.lower():7} {_format_message(record)}"


class _Json(logging.Formatter):
    """Formatter with one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _format_message(record),
        }
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str, log_format: LogFormat) -> None:
    """Send all logging of the process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def describe_exception(error: BaseException) -> str:
    """Return an exception in one line: type, message, file and line of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _format_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _format_message(record: logging.LogRecord) -> str:
    message = " ".join(record.getMessage().split())
    if record.exc_info and record.exc_info[1] is not None:
        message += f": {describe_exception(record.exc_info[1])}"
    return escape_controls(message)
