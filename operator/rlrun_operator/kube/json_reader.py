"""JSON parser for answers of the API server of any depth: users control the depth of objects, so it must not crash the operator."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

LEVELS_MAX = 100
"""Levels that are kept of a document that is too deep to parse: below the limits of all parsers and recursions here, and far above those
of a specification (`rlrun.config.base`), so that a truncated specification is refused anyway."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


class UnreadableError(ValueError):
    """Error for bytes that are not JSON."""


def parse_json(raw: bytes) -> Any:
    """Return the JSON value of `raw`; in a document too deep for the parser, values below `LEVELS_MAX` are null.

    Raises:
        UnreadableError: `raw` is not JSON.
    """
    try:
        return from_json(raw, cache_strings="keys")
    except ValueError:
        pass
    try:
        return from_json(flatten_json(raw), cache_strings="keys")
    except ValueError as error:
        raise UnreadableError(f"not JSON ({error}): {raw[:80].decode(errors='replace')!r}") from error


def flatten_json(raw: bytes, levels: int = LEVELS_MAX) -> bytes:
    """Return JSON text with null for each list and mapping below `levels`. Linear in its length, without recursion."""
    kept, start, depth = [], 0, 0
    for token in _TOKEN.finditer(raw):
        symbol = token.group()
        if symbol in (b"[", b"{"):
            depth += 1
            if depth == levels + 1:
                kept += [raw[start : token.start()], b"null"]
        elif symbol in (b"]", b"}"):
            if depth == levels + 1:
                start = token.end()
            depth -= 1
    return b"".join([*kept, raw[start:]]) if depth <= levels else b"".join(kept)
