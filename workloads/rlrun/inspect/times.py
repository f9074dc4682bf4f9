"""Times and durations as text."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(seconds: float) -> str:
    """Format seconds since the epoch as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: object) -> float | None:
    """Parse an RFC 3339 time into seconds since the epoch; returns None for other values."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def show_span(seconds: float | None) -> str:
    """Format a duration as `3d4h`, `1h02m`, `3m07s` or `12s`; None as a dash."""
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    if whole >= 86_400:
        return f"{whole // 86_400}d{whole % 86_400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def show_ago(text: str | None, now: float) -> str:
    """Format the duration from an RFC 3339 time to `now`, or a dash."""
    then = seconds_of(text)
    return show_span(None if then is None else now - then)
