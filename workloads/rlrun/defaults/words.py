"""Messages of limited length, on one line that a terminal can show."""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.runtime.printable import printable

MESSAGE_MAX = 2000
"""Longest message in the status, in characters."""


def shorten_text(text: str, limit: int = MESSAGE_MAX) -> str:
    """Return `text` as one printable line of at most `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def bound_message(parts: Iterable[str]) -> str:
    """Join `parts` into one message of at most `MESSAGE_MAX` characters, with the number of omitted parts."""
    shown: list[str] = []
    left = MESSAGE_MAX
    every = [shorten_text(part, 600) for part in parts]
    for part in every:
        left -= len(part) + 2
        if left < 40 and shown:
            break
        shown.append(part)
    more = len(every) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
