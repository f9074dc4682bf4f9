"""Decoder for large JSON documents that works in pieces, so that no step holds the interpreter's lock (GIL) for long.

`json` decodes a document in one call that holds the lock: even in a thread it would block the orchestrator's event loop. Here numpy, which
releases the lock, finds the brackets, commas and colons outside of strings. Values that are larger than a piece are split there, and
`json` decodes each piece. Texts are split between two characters. The result equals that of `json.loads`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1 << 17
"""Largest number of bytes that one call decodes, in 1 to 3 ms."""
_SCAN_BYTES = 1 << 20
MAX_LEVELS = 24
"""Number of nesting levels at which values are split. A value below them is decoded in one call."""
_ESCAPE_BYTES = 12
"""Longest escape of one character: a surrogate pair."""
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"'[0], b"\\"[0], b","[0], b":"[0]
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_from_json = json.JSONDecoder().decode


@dataclass(frozen=True)
class _Structure:
    """Brackets, commas and colons outside of strings, in the order of the document."""

    positions: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    """Character at each position."""
    depths: npt.NDArray[np.int32]
    """Number of open brackets before each position. A closing bracket has the depth of its opening one."""


def decode_json(data: bytes) -> Any:
    """Return the value of a JSON document in UTF-8, as `json.loads` does.

    Raises:
        ValueError: the data is not a JSON document.
        RecursionError: the document is nested too deeply.
    """
    if len(data) <= PIECE_BYTES:
        return _from_json(data.decode())
    data = data.strip(b" \t\r\n")
    return _Decoder(data, _find_structure(data)).value(0, len(data), 0)


class _Decoder:
    def __init__(self, data: bytes, structure: _Structure) -> None:
        self._data, self._structure = data, structure

    def value(self, start: int, end: int, level: int) -> Any:
        """Decode the value in `[start, end)`, which may have white space around it."""
        text = self._data[start : min(end, start + 1)]
        if end - start > PIECE_BYTES and level < MAX_LEVELS:
            if text == b'"':
                return self._decode_string(start, end)
            if text in (b"[", b"{") and (commas := self._find_commas(start, end)) is not None:
                return self._decode_container(start, end, commas, level)
        return _from_json(self._data[start:end].decode())

    def _find_commas(self, start: int, end: int) -> npt.NDArray[np.int64] | None:
        """Return the indices (into the structure) of the commas between the members of the container in `[start, end)`.

        Returns None if the range does not start and end with the container's own brackets.
        """
        s = self._structure
        first, last = int(np.searchsorted(s.positions, start)), int(np.searchsorted(s.positions, end)) - 1
        if first >= last or (s.positions[first], s.positions[last]) != (start, end - 1):
            return None
        depth, closing = s.depths[first], {b"["[0]: b"]"[0], b"{"[0]: b"}"[0]}.get(int(s.kinds[first]))
        inner = s.depths[first + 1 : last]
        if closing != s.kinds[last] or s.depths[last] != depth or (inner <= depth).any():
            return None
        own = (inner == depth + 1) & (s.kinds[first + 1 : last] == _COMMA)
        return np.flatnonzero(own) + first + 1

    def _decode_container(self, start: int, end: int, commas: npt.NDArray[np.int64], level: int) -> Any:
        is_list = self._data[start : start + 1] == b"["
        ends = np.append(self._structure.positions[commas], end - 1)
        array: list[Any] = []
        table: dict[str, Any] = {}
        at = 0
        start += 1
        while at < len(ends):
            # Take as many members as fit into a piece, but at least one.
            after = max(at + 1, int(np.searchsorted(ends, start + PIECE_BYTES, side="right")))
            stop = int(ends[after - 1])
            members = self._data[start:stop]
            if not members.strip(b" \t\r\n"):
                raise ValueError("a member is missing between two commas")
            if len(members) <= PIECE_BYTES:
                text = members.decode()
                if is_list:
                    array += _from_json(f"[{text}]")
                else:
                    table |= _from_json(f"{{{text}}}")
            elif is_list:
                array.append(self._decode_trimmed(start, stop, level))
            else:
                colon = self._find_colon(start, stop)
                name = _from_json(self._data[start:colon].decode())
                if not isinstance(name, str):
                    raise ValueError("a name of an object is not a string")
                table[name] = self._decode_trimmed(colon + 1, stop, level)
            start, at = stop + 1, after
        return array if is_list else table

    def _decode_trimmed(self, start: int, end: int, level: int) -> Any:
        """Decode the value in `[start, end)` without the white space around it."""
        while end > start and self._data[start] in b" \t\r\n":
            start += 1
        while end > start and self._data[end - 1] in b" \t\r\n":
            end -= 1
        return self.value(start, end, level + 1)

    def _find_colon(self, start: int, end: int) -> int:
        """Return the position of the first colon outside of strings in `[start, end)`."""
        s = self._structure
        place = int(np.searchsorted(s.positions, start))
        if place == len(s.positions) or s.positions[place] >= end or s.kinds[place] != _COLON:
            raise ValueError("a member of an object has no name")
        return int(s.positions[place])

    def _decode_string(self, start: int, end: int) -> str:
        if self._data[end - 1] != _QUOTE:
            raise ValueError("a string does not end")
        parts: list[str] = []
        start, end = start + 1, end - 1
        while start < end:
            stop = (
                end if end - start <= PIECE_BYTES else start + _cut_string(self._data[start : start + PIECE_BYTES + 1])
            )
            parts.append(_from_json(f'"{self._data[start:stop].decode()}"'))
            start = stop
        return "".join(parts)


def _cut_string(text: bytes) -> int:
    """Return the length of the longest proper prefix of a string's text that ends between two characters.

    Args:
        text: text that starts between two characters.
    """
    cut = len(text) - 1
    last = text.rfind(b"\\", 0, cut)
    if last >= cut - _ESCAPE_BYTES:
        run = last + 1 - len(text[: last + 1].rstrip(b"\\"))
        # Backslashes form pairs, and an unpaired one starts an escape.
        cut = last if run % 2 else last - 1
        if _HIGH_SURROGATE.search(text, max(0, cut - 6), cut) and _begins_escape(text, cut - 6):
            cut -= 6  # a cut inside of the pair would produce two characters
    while cut and 0x80 <= text[cut] <= 0xBF:
        cut -= 1
    if cut <= 0:
        raise ValueError("a string has no character within a piece")
    return cut


def _begins_escape(text: bytes, at: int) -> bool:
    """Return whether the backslash at `at` is not itself escaped."""
    return (at - len(text[:at].rstrip(b"\\"))) % 2 == 0


def _find_structure(data: bytes) -> _Structure:
    """Find all brackets, commas and colons outside of strings, in blocks of one megabyte."""
    structural = np.zeros(256, np.bool_)
    structural[list(b"[]{},:")] = True
    everything = np.frombuffer(data, np.uint8)
    positions: list[npt.NDArray[np.int64]] = []
    inside, escaped = False, False
    for start in range(0, len(data), _SCAN_BYTES):
        block = everything[start : start + _SCAN_BYTES]
        quotes = block == _QUOTE
        escaped = _drop_escaped(block, quotes, escaped)
        within = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ np.uint8(inside)
        inside = bool(within[-1])
        positions.append(np.flatnonzero(structural[block] & (within == 0)) + start)
    found = np.concatenate(positions)
    kinds = everything[found]
    opens = (kinds == b"["[0]) | (kinds == b"{"[0])
    closes = (kinds == b"]"[0]) | (kinds == b"}"[0])
    depths = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32) - opens
    return _Structure(found, kinds, depths)


def _drop_escaped(block: npt.NDArray[np.uint8], quotes: npt.NDArray[np.bool_], escaped: bool) -> bool:
    """Clear the quotes after an escaping backslash, and return whether the block ends with such a backslash.

    Args:
        block: bytes of the document.
        quotes: mask of the quotes in the block; changed in place.
        escaped: whether the first character is escaped.
    """
    if escaped:
        quotes[0] = False
    places = np.flatnonzero(block == _BACKSLASH)
    if not len(places):
        return False
    # In each run of backslashes, the first, third, ... escape the next character. An escaped first character does not start a run.
    first = np.empty(len(places), np.bool_)
    first[0] = True
    first[1:] = places[1:] != places[:-1] + 1
    starts = np.maximum.accumulate(np.where(first, places, 0))
    if escaped and places[0] == 0:
        starts[starts == 0] = 1
        places, starts = places[1:], starts[1:]
    escaping = places[(places - starts) % 2 == 0]
    if len(escaping) and escaping[-1] == len(block) - 1:
        quotes[escaping[:-1] + 1] = False
        return True
    quotes[escaping + 1] = False
    return False
