"""Zeros over the GPU code of other architectures, so that a CUDA library compresses to the size of one architecture.

The section `.nv_fatbin` of a library holds containers, and a container holds entries: machine code or PTX, for one
architecture each. The driver selects an entry by its header, so headers and sizes stay as they are, and only the payload
of other entries becomes zero. Such a library runs on GPUs of that one architecture only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = b".nv_fatbin"
MAGIC, HEADER_BYTES, ALIGNMENT = 0xBA55ED50, 16, 8
PTX, MACHINE_CODE = 1, 2
HOPPER = 90


@dataclass(frozen=True)
class Entry:
    """Code for one architecture: `start` and `stop` are the bytes of its payload in the library."""

    kind: int
    architecture: int
    start: int
    stop: int


def find_section(library: bytes | bytearray, name: bytes = SECTION) -> tuple[int, int]:
    """Return the first byte and the end of a section of a 64-bit little-endian ELF file, or (0, 0) without it.

    Raises:
        ValueError: the bytes are not such a file.
    """
    if bytes(library[:6]) != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file: pass a shared library of x86-64")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", library, table + size * index) for index in range(count)]
    for row in rows:
        at = rows[names][4] + row[0]
        if bytes(library[at : at + len(name) + 1]) == name + b"\0":
            return row[4], row[4] + row[5]
    return 0, 0


def containers(library: bytes | bytearray) -> Iterator[list[Entry]]:
    """Yield the entries of each container.

    Raises:
        ValueError: a container has an unknown format, or a size that does not fit.
    """
    position, end = find_section(library)
    while position + HEADER_BYTES <= end:
        magic, version, header, size = struct.unpack_from("<IHHQ", library, position)
        if magic != MAGIC:  # zeros between two containers
            position += ALIGNMENT
            continue
        stop = position + header + size
        if version != 1 or header != HEADER_BYTES or stop > end:
            raise ValueError(f"container at byte {position}: version {version}, header {header}, size {size}")
        yield list(_entries(library, position + header, stop))
        position = stop + -stop % ALIGNMENT


def _entries(library: bytes | bytearray, position: int, stop: int) -> Iterator[Entry]:
    while position < stop:
        kind, _, header, payload = struct.unpack_from("<HHIQ", library, position)
        (architecture,) = struct.unpack_from("<I", library, position + 28)
        start = position + header
        if kind not in (PTX, MACHINE_CODE) or header < 32 or start + payload > stop:
            raise ValueError(f"entry at byte {position}: kind {kind}, header {header}, payload {payload}")
        yield Entry(kind, architecture, start, start + payload)
        position = start + payload


def is_kept(entry: Entry, entries: list[Entry], architecture: int) -> bool:
    """Return whether a GPU of the architecture uses the entry: its machine code, or else the newest PTX that it can
    compile.
    """
    if any(one.kind == MACHINE_CODE and one.architecture == architecture for one in entries):
        return entry.kind == MACHINE_CODE and entry.architecture == architecture
    fitting = [one.architecture for one in entries if one.kind == PTX and one.architecture <= architecture]
    return entry.kind == PTX and bool(fitting) and entry.architecture == max(fitting)


def zero_other_architectures(library: bytes, architecture: int = HOPPER) -> tuple[bytes, int]:
    """Return the library with zeros over the code of other architectures, and the number of kept payload bytes."""
    changed, kept = bytearray(library), 0
    for entries in containers(library):
        for entry in entries:
            if is_kept(entry, entries, architecture):
                kept += entry.stop - entry.start
            else:
                changed[entry.start : entry.stop] = bytes(entry.stop - entry.start)
    return bytes(changed), kept
