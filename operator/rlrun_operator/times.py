"""Kubernetes' notation of time: RFC 3339 in UTC, whole seconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def format_rfc3339(seconds: float) -> str:
    """Return the notation of `seconds` since the epoch, rounded down."""
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: object) -> float | None:
    """Return the seconds since the epoch, or None if the text is not a time."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
