"""Token columns in messages between orchestrator and engine: a small JSON header, then arrays in their memory layout.

JSON needs 90 bytes and a dictionary per sampled token, these columns need 8 bytes: an answer of 16 x 65,536 tokens has 8 MB instead of
96 MB, and reading it is a copy.

A document is `length head padding column column ...`, little-endian: `length` is that of head and padding (32 bits), the head is a JSON
object, spaces pad it to a multiple of 4. The head determines the columns, so the reader passes their types and lengths.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, overload

MEDIA_TYPE = "application/vnd.rlrun.packed"
INTEGERS: Final = "i"
"""Type code of an `array` of 32-bit integers."""
FLOATS: Final = "f"
"""Type code of an `array` of 32-bit floats."""
Column: TypeAlias = "array[int] | array[float]"
_LENGTH = struct.Struct("<I")
_ITEM = 4


class PackedError(ValueError):
    """Error for bytes that are not such a document."""


def integer_column(values: Sequence[int]) -> array[int]:
    """Return a column of 32-bit integers.

    Raises:
        OverflowError: a value does not fit.
        TypeError: a value is not an integer.
    """
    return values if isinstance(values, array) and values.typecode == INTEGERS else array(INTEGERS, values)


def pack_document(head: Mapping[str, Any], columns: Sequence[Column]) -> bytes:
    """Return a document; `columns` have the types above."""
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ITEM)
    return b"".join([_LENGTH.pack(len(text)), text, *map(_swap_bytes, columns)])


class Reader:
    """Reader of one document; `column` returns its columns in order.

    Args:
        data: bytes of the document.

    Raises:
        PackedError: it has no valid head.
    """

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        if len(data) < _LENGTH.size:
            raise PackedError(f"{len(data)} bytes are too few for a head")
        (length,) = _LENGTH.unpack_from(self._data)
        self._place = _LENGTH.size + length
        if self._place > len(data):
            raise PackedError(f"a head of {length} bytes does not fit into {len(data)} bytes")
        try:
            head = json.loads(bytes(self._data[_LENGTH.size : self._place]))
        except (ValueError, RecursionError):
            raise PackedError("the head is not JSON") from None
        if not isinstance(head, dict):
            raise PackedError("the head is not a JSON object")
        self.head: dict[str, Any] = head

    @overload
    def column(self, kind: Literal["i"], count: int) -> array[int]: ...
    @overload
    def column(self, kind: Literal["f"], count: int) -> array[float]: ...
    def column(self, kind: Literal["i", "f"], count: int) -> Column:
        """Return the next column: `count` values of type code `kind`.

        Raises:
            PackedError: the document has fewer values.
        """
        end = self._place + count * _ITEM
        if not isinstance(count, int) or count < 0 or end > len(self._data):
            raise PackedError(f"a column of {count} values does not fit into {len(self._data)} bytes")
        values = array(kind)
        values.frombytes(self._data[self._place : end])
        self._place = end
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def end(self) -> None:
        """Check that the document has no more data.

        Raises:
            PackedError: bytes follow the last column.
        """
        if self._place != len(self._data):
            raise PackedError(f"{len(self._data) - self._place} bytes follow the last column")


def _swap_bytes(values: Column) -> bytes | memoryview:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return memoryview(values).cast("B")
