"""Binary formats: token columns in messages, and the difference between two versions of a bucket.

Token columns between orchestrator and engine are a small JSON header, then arrays in their memory layout. JSON needs 90 bytes and a
dictionary per sampled token, these columns need 8 bytes: an answer of 16 x 65,536 tokens has 8 MB instead of 96 MB, and reading it is a
copy.

A document is `length head padding column column ...`, little-endian: `length` is that of head and padding (32 bits), the head is a JSON
object, spaces pad it to a multiple of 4. The head determines the columns, so the reader passes their types and lengths.

A difference contains the places of changed words and their new bits; its computation is pure. A word has two bytes for every number format
(one, if the number of bytes is odd), and all words are compared by bits. A difference is a sequence of blocks of `BLOCK_WORDS` words. Each
block has a head (coding, changed words, escapes), the places of its changed words in the smallest coding for this block, and the new
words. New words are copied, not added, so that the result is bit for bit the new version.

    BITMAP   one bit per word of the block
    GAPS8    unchanged words before each changed one, in a byte; 255 means a number of 32 bits, all of which follow
    GAPS16   the same in two bytes, with 65,535
    WHOLE    all words of the block; no places
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

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


def pack_document(head: Mapping[str, Any], columns: Sequence[Column | bytes]) -> bytes:
    """Return a document; `columns` have the types above, or are raw bytes whose order the head describes."""
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

    def raw(self, size: int) -> bytes:
        """Return the next column of raw bytes.

        Raises:
            PackedError: the document has fewer bytes.
        """
        end = self._place + size
        if not isinstance(size, int) or size < 0 or end > len(self._data):
            raise PackedError(f"a column of {size} bytes does not fit into {len(self._data)} bytes")
        found = bytes(self._data[self._place : end])
        self._place = end
        return found

    def end(self) -> None:
        """Check that the document has no more data.

        Raises:
            PackedError: bytes follow the last column.
        """
        if self._place != len(self._data):
            raise PackedError(f"{len(self._data) - self._place} bytes follow the last column")


def _swap_bytes(values: Column | bytes) -> bytes | memoryview:
    if isinstance(values, bytes):
        return values
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return memoryview(values).cast("B")


BLOCK_WORDS = 1 << 22
"""Words of a block: limits the additional memory of a comparison, and the time for which a thread blocks others."""
_HEAD = struct.Struct("<BxxxII")
Bytes = NDArray[np.uint8]
"""Bytes [n] of a bucket, or of its difference."""


class DeltaError(ValueError):
    """Error for a difference that is damaged, or belongs to another bucket."""


class _Coding(IntEnum):
    BITMAP = 0
    GAPS8 = 1
    GAPS16 = 2
    WHOLE = 3


_GAPS: dict[_Coding, np.dtype[Any]] = {_Coding.GAPS8: np.dtype("<u1"), _Coding.GAPS16: np.dtype("<u2")}


def encode_difference(base: Bytes, new: Bytes, *, most: int) -> Bytes | None:
    """Return the difference of two versions; empty if they are equal, None if it has more bytes than `most`.

    Args:
        base: version that the receiver has.
        new: version that the receiver needs; of the same length.
        most: maximum size of a useful difference, in bytes.
    """
    found: list[bytes] = []
    size, changed = 0, False
    for old, now in zip(_split_blocks(base), _split_blocks(new), strict=True):
        places = np.flatnonzero(old != now)
        changed |= bool(len(places))
        found.append(_encode_block(places, now))
        size += len(found[-1])
        if size > most and changed:
            return None
    return np.frombuffer(bytearray().join(found) if changed else bytearray(), np.uint8)


def apply_difference(delta: Bytes, body: Bytes) -> None:
    """Convert the base to the new version in place.

    Args:
        delta: result of `encode_difference`.
        body: the base, writable; undefined after an error.

    Raises:
        DeltaError: the difference is damaged, or belongs to another bucket. A checksum of the result detects the remaining cases.
    """
    if not len(delta):
        return
    content, offset = delta.tobytes(), 0
    for words in _split_blocks(body):
        try:
            offset = _apply_block(content, offset, words)
        except (ValueError, struct.error, IndexError) as error:
            raise DeltaError(f"the difference is damaged at byte {offset} of {len(content)}: {error}") from None
    if offset != len(content):
        raise DeltaError(f"the difference has {len(content)} bytes, but the bucket uses {offset}")


def _split_blocks(body: Bytes) -> Iterator[NDArray[np.unsignedinteger]]:
    words = body.view("<u2" if len(body) % 2 == 0 else "<u1")
    for start in range(0, len(words), BLOCK_WORDS):
        yield words[start : start + BLOCK_WORDS]


def _encode_block(places: NDArray[np.int64], words: NDArray[np.unsignedinteger]) -> bytes:
    """Return one block in the smallest coding."""
    width, count = words.itemsize, len(places)
    if count > len(words) // 2:
        return _HEAD.pack(_Coding.WHOLE, len(words), 0) + words.tobytes()
    gaps = np.diff(places, prepend=-1) - 1
    escapes = {coding: int(np.count_nonzero(gaps >= _escape_value(coding))) for coding in _GAPS}
    sizes = {coding: count * _GAPS[coding].itemsize + 4 * many for coding, many in escapes.items()}
    sizes[_Coding.BITMAP] = -(-len(words) // 8)
    coding = min(sizes, key=lambda one: (sizes[one], one))
    if sizes[coding] + count * width >= len(words) * width:
        return _HEAD.pack(_Coding.WHOLE, len(words), 0) + words.tobytes()
    values = words[places].tobytes()
    if coding == _Coding.BITMAP:
        mask = np.zeros(len(words), np.bool_)
        mask[places] = True
        return _HEAD.pack(coding, count, 0) + np.packbits(mask).tobytes() + values
    large = gaps[gaps >= _escape_value(coding)].astype("<u4").tobytes()
    short: bytes = np.minimum(gaps, _escape_value(coding)).astype(_GAPS[coding]).tobytes()
    return _HEAD.pack(coding, count, escapes[coding]) + short + large + values


def _escape_value(coding: _Coding) -> int:
    return int(np.iinfo(_GAPS[coding]).max)


def _apply_block(content: bytes, offset: int, words: NDArray[np.unsignedinteger]) -> int:
    """Apply one block and return the offset of the next one."""
    kind, count, escapes = _HEAD.unpack_from(content, offset)
    offset += _HEAD.size
    coding = _Coding(kind)
    if count > len(words) or escapes > count:
        raise ValueError(f"{count} changed words of {len(words)}")
    if coding == _Coding.WHOLE:
        words[:] = np.frombuffer(content, words.dtype, len(words), offset)
        return offset + words.nbytes
    if coding == _Coding.BITMAP:
        size = -(-len(words) // 8)
        mask = np.unpackbits(np.frombuffer(content, np.uint8, size, offset), count=len(words))
        places, offset = np.flatnonzero(mask), offset + size
    else:
        gaps = np.frombuffer(content, _GAPS[coding], count, offset).astype(np.int64)
        offset += count * _GAPS[coding].itemsize
        gaps[gaps == _escape_value(coding)] = np.frombuffer(content, "<u4", escapes, offset)
        places, offset = np.cumsum(gaps + 1) - 1, offset + 4 * escapes
    if len(places) != count or (count and places[-1] >= len(words)):
        raise ValueError(f"{len(places)} places, {count} changed words of {len(words)}")
    words[places] = np.frombuffer(content, words.dtype, count, offset)
    return int(offset + count * words.itemsize)
