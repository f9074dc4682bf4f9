"""Smaller copies of shared libraries with the same memory: without debug sections, and with zeros that are not stored.

The file of a 64-bit ELF library holds segments, which the loader maps, and sections, of which it needs none. Both functions
remove complete pages from the file, so that every remaining byte keeps its place in its page, and compare the memory that
the loader would map before and after. Needs only Python, because the images' builds run it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

LOAD, PROGRAM_HEADERS = 1, 6
"""Types of segments: PT_LOAD, PT_PHDR."""
NULL, NOBITS = 0, 8
"""Types of sections: an unused row, and one without bytes in the file."""
ALLOCATED, WRITABLE = 2, 2
"""Flags: SHF_ALLOC of a section, PF_W of a segment."""
PAGE_BYTES = 4096
MIN_HOLE_BYTES = 65_536
"""Shorter zeros stay in the file: each hole costs a program header, and each mapping a system call when the library is loaded."""
_PROGRAM_ROW, _SECTION_ROW = struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
_TABLES = struct.Struct("<QQIHHHHHH")
_TABLES_AT = 0x20

Range = tuple[int, int]
"""First byte and end of a part of a file."""


class ElfError(ValueError):
    """A file is not a library that can be changed without a change of its memory."""


@dataclass(frozen=True)
class Segment:
    """A row of the table of program headers."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    stored: int
    """Bytes in the file."""
    mapped: int
    """Bytes in memory; those after `stored` are zero."""
    align: int

    def packed(self) -> bytes:
        """Return the row."""
        fields = (self.kind, self.flags, self.offset, self.address, self.physical, self.stored, self.mapped, self.align)
        return _PROGRAM_ROW.pack(*fields)


@dataclass(frozen=True)
class Section:
    """A row of the table of section headers; `rest` holds the fields that stay."""

    name: bytes
    name_at: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    rest: tuple[int, int, int, int]

    def packed(self) -> bytes:
        """Return the row."""
        return _SECTION_ROW.pack(self.name_at, self.kind, self.flags, self.address, self.offset, self.size, *self.rest)


@dataclass(frozen=True)
class Elf:
    """Headers of a file."""

    segments: tuple[Segment, ...]
    sections: tuple[Section, ...]
    segments_at: int
    sections_at: int
    names: int
    """Row of the section with the names."""

    @property
    def align(self) -> int:
        """Bytes that the distance between address and offset of a segment must be a multiple of."""
        return max([PAGE_BYTES, *(each.align for each in self.segments if each.kind == LOAD)])


def read_headers(data: bytes) -> Elf:
    """Return the headers of a 64-bit little-endian ELF file.

    Raises:
        ElfError: it is another file.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ElfError("not a 64-bit little-endian ELF file: pass a shared library of x86-64 or aarch64")
    at, sections_at, _, _, row, count, section_row, section_count, names = _TABLES.unpack_from(data, _TABLES_AT)
    if row != _PROGRAM_ROW.size or (section_count and section_row != _SECTION_ROW.size):
        raise ElfError(f"rows of {row} and {section_row} bytes instead of {_PROGRAM_ROW.size} and {_SECTION_ROW.size}")
    segments = tuple(Segment(*_PROGRAM_ROW.unpack_from(data, at + row * index)) for index in range(count))
    rows = [_SECTION_ROW.unpack_from(data, sections_at + section_row * index) for index in range(section_count)]
    sections = tuple(
        Section(_text(data, rows[names][4] + name), name, kind, flags, address, offset, size, tuple(rest))
        for name, kind, flags, address, offset, size, *rest in rows
    )
    return Elf(segments, sections, at, sections_at, names)


def drop_debug_sections(data: bytes) -> bytes:
    """Return a library without the sections that only a debugger reads; its table of symbols stays.

    A file without such sections is returned as it is.

    Raises:
        ElfError: the bytes are not a library, or its memory would change.
    """
    elf = read_headers(data)
    debug = {section for section in elf.sections if _is_debug(section)}
    stored = ((each.offset, each.offset + each.size) for each in debug if each.kind != NOBITS)
    cuts = _whole_pages(stored, elf.align, gap=64)  # the alignment between two of them
    used = list(_used_ranges(elf, debug))
    cuts = [cut for cut in cuts if not any(cut[0] < stop and start < cut[1] for start, stop in used)]
    if not cuts:
        return data
    empty = Section(b"", 0, NULL, 0, 0, 0, 0, (0, 0, 0, 0))
    kept = [empty if each in debug else replace(each, offset=_moved(each.offset, cuts)) for each in elf.sections]
    segments = [replace(each, offset=_moved(each.offset, cuts)) for each in elf.segments]
    changed = bytearray(_without(data, cuts))
    segments_at, sections_at = _moved(elf.segments_at, cuts), _moved(elf.sections_at, cuts)
    _write(changed, segments_at, (each.packed() for each in segments))
    _write(changed, sections_at, (each.packed() for each in kept))
    struct.pack_into("<QQ", changed, _TABLES_AT, segments_at, sections_at)
    return _same_memory(data, bytes(changed))


def punch_holes(data: bytes, zeros: Iterable[Range]) -> bytes:
    """Return a library that does not store the given zeros: the loader maps anonymous pages there, which are zero.

    A segment becomes one segment per stored part. The result has no sections, because a section cannot have a hole.

    Args:
        data: the library.
        zeros: ranges of zero bytes in segments that are not writable.

    Raises:
        ElfError: a range has other bytes, or is outside of such a segment; or the memory would change.
    """
    elf = read_headers(data)
    if any(each.kind == PROGRAM_HEADERS for each in elf.segments):
        raise ElfError("the library maps its program headers, which would have to move")
    holes = [hole for hole in _whole_pages(zeros, elf.align) if hole[1] - hole[0] >= MIN_HOLE_BYTES]
    if not holes:
        return data
    for start, stop in holes:
        if data.count(0, start, stop) != stop - start:
            raise ElfError(f"bytes {start} to {stop} are not zero")
    split = [part for each in elf.segments for part in _split(each, holes)]
    if sum(each.stored for each in split) != sum(each.stored for each in elf.segments) - sum(b - a for a, b in holes):
        raise ElfError("a hole is outside of the segments, in two of them, or in a writable one")
    end = max(each.offset + each.stored for each in elf.segments)
    changed = bytearray(_without(data[:end], holes))
    # On pages of their own: the loader zeroes the rest of the page in which the stored bytes of the last segment end.
    changed += bytes(-len(changed) % elf.align)
    table = b"".join(replace(each, offset=_moved(each.offset, holes)).packed() for each in split)
    _, _, flags, header, row, *_ = _TABLES.unpack_from(data, _TABLES_AT)
    _TABLES.pack_into(changed, _TABLES_AT, len(changed), 0, flags, header, row, len(split), 0, 0, 0)
    return _same_memory(data, bytes(changed) + table)


def hash_memory(data: bytes, ignored: Iterable[Range] = ()) -> dict[int, str]:
    """Return SHA-256 of what the loader maps, before relocations, by first address; adjacent segments are one entry.

    Args:
        data: the library.
        ignored: addresses that count as zeros.
    """
    view = memoryview(data)
    found: dict[int, Any] = {}
    first = end = -1
    loaded = [each for each in read_headers(data).segments if each.kind == LOAD]
    for each in sorted(loaded, key=lambda each: each.address):
        if each.address != end:
            first = each.address
            found[first] = hashlib.sha256()
        at, stop, shift = each.address, each.address + each.stored, each.offset - each.address
        for start, until in sorted(ignored):
            if at <= start < stop:
                found[first].update(view[at + shift : start + shift])
                at = min(until, stop)
                found[first].update(bytes(at - start))
        found[first].update(view[at + shift : stop + shift])
        found[first].update(bytes(each.mapped - each.stored))
        end = each.address + each.mapped
    return {address: digest.hexdigest() for address, digest in found.items()}


def _split(segment: Segment, holes: Sequence[Range]) -> Iterator[Segment]:
    start, stop = segment.offset, segment.offset + segment.stored
    inside = [hole for hole in holes if start < hole[0] and hole[1] <= stop]
    if segment.kind != LOAD or segment.flags & WRITABLE or not inside:
        yield segment
        return
    # The first hole may not begin the segment, because a segment without stored bytes is not mapped by every loader.
    ends = [*(hole for hole in inside), (stop, start + segment.mapped)]
    for hole_start, hole_stop in ends:
        moved = start - segment.offset
        if hole_stop > start:
            yield replace(
                segment,
                offset=start,
                address=segment.address + moved,
                physical=segment.physical + moved,
                stored=hole_start - start,
                mapped=hole_stop - start,
            )
        start = hole_stop


def _is_debug(section: Section) -> bool:
    return section.name.startswith((b".debug_", b".zdebug_")) and not section.flags & ALLOCATED


def _used_ranges(elf: Elf, dropped: set[Section]) -> Iterator[Range]:
    yield 0, 64
    yield elf.segments_at, elf.segments_at + _PROGRAM_ROW.size * len(elf.segments)
    yield elf.sections_at, elf.sections_at + _SECTION_ROW.size * len(elf.sections)
    for segment in elf.segments:
        yield segment.offset, segment.offset + segment.stored
    for section in elf.sections:
        if section not in dropped and section.kind not in (NULL, NOBITS):
            yield section.offset, section.offset + section.size


def _whole_pages(ranges: Iterable[Range], align: int, gap: int = 0) -> list[Range]:
    """Return the complete pages of the ranges, after those with at most `gap` bytes between them were joined."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    pages = [(start + -start % align, stop - stop % align) for start, stop in joined]
    return [(start, stop) for start, stop in pages if start < stop]


def _without(data: bytes, cuts: Sequence[Range]) -> bytes:
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(data)]
    return b"".join(data[start:stop] for start, stop in zip(starts, stops, strict=True))


def _moved(offset: int, cuts: Sequence[Range]) -> int:
    return offset - sum(min(offset, stop) - start for start, stop in cuts if start < offset)


def _write(data: bytearray, at: int, rows: Iterable[bytes]) -> None:
    content = b"".join(rows)
    data[at : at + len(content)] = content


def _same_memory(before: bytes, after: bytes) -> bytes:
    """Return `after` if its memory is that of `before`. The three headers may differ: code does not read them.

    They are mapped in libraries that patchelf has changed, sections too.
    """
    elf = read_headers(before)
    headers = [
        (0, 64),
        (elf.segments_at, elf.segments_at + _PROGRAM_ROW.size * len(elf.segments)),
        (elf.sections_at, elf.sections_at + _SECTION_ROW.size * len(elf.sections)),
    ]
    ignored = [
        (start - each.offset + each.address, stop - each.offset + each.address)
        for start, stop in headers
        for each in elf.segments
        if each.kind == LOAD and each.offset <= start < each.offset + each.stored
    ]
    if hash_memory(before, ignored) != hash_memory(after, ignored):
        raise ElfError("the memory of the changed library would differ")
    return after


def _text(data: bytes, at: int) -> bytes:
    return data[at : data.index(b"\0", at)]
