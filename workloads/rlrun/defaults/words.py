"""Messages of bounded length, on one line that a terminal can show."""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.runtime.printable import printable

MESSAGE_MAX = 2000
"""Characters of a message in the status."""


def shorten_text(text: str, limit: int = MESSAGE_MAX) -> str:
    """`text` on one line that a terminal can show, of at most `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def bound_message(parts: Iterable[str]) -> str:
    """`parts` as one message of at most `MESSAGE_MAX` characters, with the number of those left out."""
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
