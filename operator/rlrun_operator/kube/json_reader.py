"""JSON from the API server, however deep: objects hold what users have written, and a parser's limit must not be theirs to exceed."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

LEVELS_MAX = 100
"""Levels of a document that are kept of one that is too deep to be parsed whole: below the limits of every parser and walk here, and
far above what a specification may have (`rlrun.config.free`), so that what is cut off is refused anyway."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


class UnreadableError(ValueError):
    """Error for bytes that are no JSON."""


def parse_json(raw: bytes) -> Any:
    """The JSON value of `raw`; what is nested too deeply for the parser is null from `LEVELS_MAX` on.

    Raises:
        UnreadableError: `raw` is no JSON.
    """
    try:
        return from_json(raw, cache_strings="keys")
    except ValueError:
        pass
    try:
        return from_json(flatten_json(raw), cache_strings="keys")
    except ValueError as error:
        raise UnreadableError(f"no JSON ({error}): {raw[:80].decode(errors='replace')!r}") from error


def flatten_json(raw: bytes, levels: int = LEVELS_MAX) -> bytes:
    """JSON text with null for every list and mapping below `levels`. Linear in its length, and without recursion."""
    kept, begin, depth = [], 0, 0
    for token in _TOKEN.finditer(raw):
        symbol = token.group()
        if symbol in (b"[", b"{"):
            depth += 1
            if depth == levels + 1:
                kept += [raw[begin : token.start()], b"null"]
        elif symbol in (b"]", b"}"):
            if depth == levels + 1:
                begin = token.end()
            depth -= 1
    return b"".join([*kept, raw[begin:]]) if depth <= levels else b"".join(kept)
