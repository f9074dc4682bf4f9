"""Smaller libraries: zeros that are not stored, and no debug sections; the loaded memory stays the same."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tools.elf_file import LOAD, ElfError, drop_debug_sections, punch_holes, read_headers

HOLE_BYTES = 1 << 20
SOURCE = f"""
#define MIB {HOLE_BYTES}
const unsigned char first[8192] = {{1, 2, 3}};
const unsigned char zeros[MIB] = {{0}};
const unsigned char last[8192] = {{[0] = 7, [8191] = 9}};
static int counter = 41;
int uninitialized[4096];
int count(void) {{ return ++counter; }}
int sum(void) {{ int all = 0; for (int i = 0; i < 4096; i++) all += uninitialized[i]; return all; }}
const unsigned char *parts[] = {{first, zeros, last}};
"""
READ = """
import ctypes, hashlib, sys
library = ctypes.CDLL(sys.argv[1])
base = next(int(line.split("-")[0], 16) for line in open("/proc/self/maps") if sys.argv[1] in line)
with open("/proc/self/mem", "rb") as memory:
    for part in sys.argv[2].split():
        at, size = map(int, part.split(":"))
        memory.seek(base + at)
        print(hashlib.sha256(memory.read(size)).hexdigest())
print(library.count(), library.sum())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared library with debug sections and 1 MiB of constant zeros between other constants."""
    folder = tmp_path_factory.mktemp("elf")
    (folder / "library.c").write_text(SOURCE)
    debug = "".join(f"int used_{index}(int x) {{ return x * {index}; }}\n" for index in range(2000))
    (folder / "debug.c").write_text(debug)
    command = ["gcc", "-g3", "-O0", "-shared", "-fPIC", "-o", "library.so", "library.c", "debug.c"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "library.so").read_bytes()


def zeros_of(library: bytes) -> tuple[int, int]:
    """Return the range of the stored zeros."""
    at = library.index(bytes(HOLE_BYTES))
    return at, at + HOLE_BYTES


def move_data_to_end(library: bytes) -> bytes:
    """Return the library with its writable segment after the debug sections, as patchelf does."""
    elf = read_headers(library)
    (data,) = [each for each in elf.segments if each.kind == LOAD and each.flags & 2]
    first = data.offset - data.offset % 4096
    moved = bytearray(library + bytes(-len(library) % 4096))
    shift = len(moved) - first
    moved += library[first : data.offset + data.stored]
    for index, each in enumerate(elf.segments):
        if data.offset <= each.offset < data.offset + data.stored:
            struct.pack_into("<Q", moved, elf.segments_at + 56 * index + 8, each.offset + shift)
    for index, section in enumerate(elf.sections):
        if section.flags & 2 and data.offset <= section.offset < data.offset + data.stored:
            struct.pack_into("<Q", moved, elf.sections_at + 64 * index + 24, section.offset + shift)
    return bytes(moved)


def read_process(library: bytes, folder: Path, read: bytes) -> list[str]:
    """Load a library in a process and return hashes of the segments of `read` that are not writable, and what it computes."""
    path = folder / "library.so"
    path.write_bytes(library)
    segments = [each for each in read_headers(read).segments if each.kind == LOAD and not each.flags & 2]
    # Not the ELF header and the program headers: both differ, and the code does not read them.
    parts = [(max(each.address, 4096), each.address + each.mapped) for each in segments]
    asked = " ".join(f"{start}:{stop - start}" for start, stop in parts if start < stop)
    command = [sys.executable, "-c", READ, str(path), asked]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_hole_is_not_stored_and_memory_is_equal(library: bytes, tmp_path: Path) -> None:
    start, stop = zeros_of(library)
    smaller = punch_holes(library, [(start, stop)])
    assert len(smaller) < len(library) - HOLE_BYTES + 3 * 4096
    expected = read_process(library, tmp_path, library)
    assert len(expected) > 3, "the segment with the zeros is among those that are read"
    assert expected[-1] == "42 0"
    assert read_process(smaller, tmp_path, library) == expected


def test_hole_splits_segment_and_removes_sections(library: bytes) -> None:
    before, after = (read_headers(each) for each in (library, punch_holes(library, [zeros_of(library)])))
    loads = [[each for each in elf.segments if each.kind == LOAD] for elf in (before, after)]
    assert len(loads[1]) == len(loads[0]) + 1
    assert all((each.address - each.offset) % each.align == 0 for each in loads[1]), "the loader refuses other offsets"
    assert [each.address for each in loads[1]] == sorted(each.address for each in loads[1])
    last = max(each.offset + each.stored for each in loads[1])
    assert after.segments_at >= last + -last % 4096, "zeros of the last segment would overwrite the program headers"
    assert after.sections == ()
    (end,) = struct.unpack_from("<H", punch_holes(library, [zeros_of(library)]), 0x38)
    assert end == len(after.segments)


def test_short_zeros_stay_stored(library: bytes) -> None:
    start, _ = zeros_of(library)
    assert punch_holes(library, [(start, start + 32_768)]) == library


def test_other_bytes_and_writable_memory_are_refused(library: bytes) -> None:
    start, stop = zeros_of(library)
    with pytest.raises(ElfError, match="are not zero"):
        punch_holes(library, [(start - 8192, stop)])
    with pytest.raises(ElfError, match="outside of the segments, in two of them, or in a writable one"):
        punch_holes(library + bytes(HOLE_BYTES), [(len(library), len(library) + HOLE_BYTES)])
    with pytest.raises(ElfError, match="not a 64-bit little-endian ELF file"):
        punch_holes(b"\x7fELF\x01" + library[5:], [])


def test_debug_sections_are_removed_and_memory_is_equal(library: bytes, tmp_path: Path) -> None:
    smaller = drop_debug_sections(library)
    assert len(smaller) < len(library) - 100_000
    assert read_process(smaller, tmp_path, library) == read_process(library, tmp_path, library)
    names = {each.name for each in read_headers(smaller).sections}
    assert not [name for name in names if name.startswith(b".debug")]
    assert {b".symtab", b".strtab", b".text"} <= names, "stack traces still have names"
    (tmp_path / "smaller.so").write_bytes(smaller)
    listed = subprocess.run(["nm", str(tmp_path / "smaller.so")], capture_output=True, text=True, check=True)
    assert " T used_7\n" in listed.stdout
    assert listed.stderr == ""
    assert drop_debug_sections(smaller) == smaller
    assert ctypes.CDLL(str(tmp_path / "smaller.so")).used_7(6) == 42


def test_debug_sections_before_a_segment_are_removed(library: bytes, tmp_path: Path) -> None:
    """Wheels contain libraries that patchelf has changed: it adds a segment at the end of the file."""
    moved = move_data_to_end(library)
    expected = read_process(library, tmp_path, library)
    assert read_process(moved, tmp_path, library) == expected
    smaller = drop_debug_sections(moved)
    assert len(smaller) < len(moved) - 100_000
    assert read_process(smaller, tmp_path, library) == expected


def test_part_that_another_section_uses_stays(library: bytes) -> None:
    elf = read_headers(library)
    names = [each.name for each in elf.sections]
    inside = elf.sections[names.index(b".debug_info")]
    changed = bytearray(library)
    at = elf.sections_at + 64 * names.index(b".comment") + 24
    struct.pack_into("<Q", changed, at, inside.offset + inside.size // 2)
    assert drop_debug_sections(bytes(changed)) == bytes(changed)
