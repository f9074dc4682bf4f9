"""Stubs with which torch's CUDA build starts on a machine without the CUDA libraries; only for CPU test images.

The package index has only one build of torch for Linux, which is linked against 2.7 GB of NVIDIA libraries. A CPU never
calls them, but the dynamic loader requires them. The CPU images leave those packages out. This script runs once in the
image's build and writes one small shared library that defines every symbol of the missing libraries, under their names.
Each function does nothing and returns 1, an error code in all of these APIs. The CUDA runtime itself (2 MB) is the real
one: it reports no device to torch, so nothing calls the others.

Usage: python cuda_stubs.py (with the Python that has torch; standard library only, x86-64 Linux)
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STUB = "libcuda_absent.so"
PAGE = 0x1000
WEAK = 2
DRIVER = "libcuda.so.1"
"""Library of a GPU's driver, which is in no package, and without which torch starts."""
DT_NULL, DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 1, 4, 5, 6, 10, 11, 14
DT_VERSYM, DT_VERDEF, DT_VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
SHT_DYNAMIC, SHT_DYNSYM, SHT_VERNEED, SHT_VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
Symbol = tuple[str, str]
"""A name and its version, "" for none."""
SYMBOL = struct.Struct("<IBBHQQ")
"""An Elf64_Sym: name, info, other, section, value, size."""
FUNCTION = 0x12
"""A symbol's info: global, a function."""
HEADERS = 64 + 5 * 56
"""Bytes of the file's header and of the five that describe its segments."""
CODE = bytes.fromhex("b801000000c3")  # mov eax, 1; ret


@dataclass(frozen=True)
class Library:
    """Parts of a shared library that the dynamic loader reads."""

    needed: frozenset[str]
    defined: frozenset[str]
    undefined: frozenset[Symbol]
    """Symbols that other libraries must define; weak symbols are left out."""


def read_library(file: Path) -> Library:
    """Read the dynamic section and symbols of an x86-64 shared library.

    Raises:
        ValueError: the file is not such a library.
    """
    data = file.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{file} is no 64-bit little-endian ELF file")
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQII", data, sections_at + index * size) for index in range(count)]
    found = {kind: (start, length, headers[link][4]) for _, kind, _, _, start, length, link, _ in headers}
    start, length, strings = found[SHT_DYNAMIC]
    entries = struct.iter_unpack("<QQ", data[start : start + length])
    needed = {_string(data, strings + value) for tag, value in entries if tag == DT_NEEDED}
    start, length, strings = found[SHT_DYNSYM]
    versions = _needed_versions(data, *found[SHT_VERNEED]) if SHT_VERNEED in found else {}
    marks_at = found[SHT_VERSYM][0] if SHT_VERSYM in found else None
    defined: set[str] = set()
    undefined: set[Symbol] = set()
    for index, (name, info, _, section, _, _) in enumerate(SYMBOL.iter_unpack(data[start : start + length])):
        if section:
            defined.add(_string(data, strings + name))
        elif name and info >> 4 != WEAK:
            mark = struct.unpack_from("<H", data, marks_at + 2 * index)[0] if marks_at is not None else 0
            undefined.add((_string(data, strings + name), versions.get(mark, "")))
    return Library(frozenset(needed), frozenset(defined), frozenset(undefined))


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _needed_versions(data: bytes, at: int, length: int, strings: int) -> dict[int, str]:
    """Return the version of each mark of a symbol (Linux Standard Base, "Symbol Versioning")."""
    versions = {}
    end = at + length
    while at < end:
        _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(count):
            _, _, mark, name, further = struct.unpack_from("<IHHII", data, entry)
            versions[mark] = _string(data, strings + name)
            entry += further
        if not following:
            break
        at += following
    return versions


def stub_library(soname: str, symbols: Sequence[Symbol]) -> bytes:
    """Return a shared library whose functions `symbols` all do `return 1`.

    It consists of read-only tables, one page of code and the dynamic section, each on separate pages.
    """
    strings = _Strings()
    name_at = strings.add(soname)
    versions = [soname, *sorted({version for _, version in symbols if version})]  # the first is the library's own
    definitions = b"".join(
        struct.pack(
            "<HHHHIII", 1, index == 0, index + 1, 1, _hash(version), 20, 0 if index + 1 == len(versions) else 28
        )
        + struct.pack("<II", strings.add(version), 0)
        for index, version in enumerate(versions)
    )
    marks = struct.pack(f"<{len(symbols) + 1}H", 0, *(versions.index(v) + 1 if v else 1 for _, v in symbols))
    hashes = _hash_table([name for name, _ in symbols])
    names = [strings.add(name) for name, _ in symbols]
    tables = {
        DT_SYMTAB: bytes(SYMBOL.size * (len(symbols) + 1)),
        DT_HASH: hashes,
        DT_VERDEF: definitions,
        DT_VERSYM: marks,
    }
    places, end = {}, HEADERS
    for tag, table in {**tables, DT_STRTAB: strings.table}.items():
        places[tag], end = end, end + -(-len(table) // 8) * 8
    code_at = -(-end // PAGE) * PAGE
    dynamic_at = code_at + PAGE
    tables[DT_SYMTAB] = bytes(SYMBOL.size) + b"".join(
        SYMBOL.pack(name, FUNCTION, 0, 1, code_at, len(CODE)) for name in names
    )
    dynamic = {
        DT_SONAME: name_at,
        **places,
        DT_STRSZ: len(strings.table),
        DT_SYMENT: SYMBOL.size,
        DT_VERDEFNUM: len(versions),
    }
    dynamic_section = b"".join(struct.pack("<QQ", *entry) for entry in [*dynamic.items(), (DT_NULL, 0)])
    body = bytearray(_headers(end, code_at, dynamic_at, len(dynamic_section)))
    for tag, table in {**tables, DT_STRTAB: bytes(strings.table)}.items():
        body = body.ljust(places[tag], b"\0") + table
    return bytes(body.ljust(code_at, b"\0") + CODE.ljust(PAGE, b"\0") + dynamic_section)


class _Strings:
    def __init__(self) -> None:
        self.table = bytearray(b"\0")

    def add(self, text: str) -> int:
        self.table += text.encode() + b"\0"
        return len(self.table) - len(text) - 1


def _headers(tables_end: int, code_at: int, dynamic_at: int, dynamic_length: int) -> bytes:
    read, write, execute = 4, 2, 1
    load, dynamic, stack = 1, 2, 0x6474E551
    segments = [
        (load, read, 0, tables_end, PAGE),
        (load, read | execute, code_at, PAGE, PAGE),
        (load, read | write, dynamic_at, dynamic_length, PAGE),  # the loader relocates it in place
        (dynamic, read | write, dynamic_at, dynamic_length, 8),
        (stack, read | write, 0, 0, 16),  # without it the loader makes the process's stack executable
    ]
    shared_object, x86_64 = 3, 62
    fields = (shared_object, x86_64, 1, 0, 64, 0, 0, 64, 56, len(segments), 64, 0, 0)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", *fields)
    return header + b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, length, length, align)
        for kind, flags, at, length, align in segments
    )


def _hash(name: str) -> int:
    """Return the hash of the ELF specification."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value


def _hash_table(names: Sequence[str]) -> bytes:
    """Return the hash table of the ELF specification; symbol 0 is undefined."""
    heads, chain = [0] * (len(names) // 2 + 1), [0] * (len(names) + 1)
    for index, name in enumerate(names, start=1):
        bucket = _hash(name) % len(heads)
        chain[index], heads[bucket] = heads[bucket], index
    return struct.pack(f"<{2 + len(heads) + len(chain)}I", len(heads), len(chain), *heads, *chain)


def missing(torch: Path) -> tuple[list[str], list[Symbol]]:
    """Return the missing libraries of torch, and the symbols that only those define."""
    packaged = {file.name: file for file in torch.parent.glob("nvidia/**/lib/*.so*")}
    own = {file.name: file for file in [*torch.glob("lib/*.so*"), *torch.glob("_C.*.so")] if file.name != STUB}
    libraries = {name: read_library(file) for name, file in own.items() if not file.is_symlink()}
    wanted = frozenset[str]().union(*(library.needed for library in libraries.values())) - set(libraries) - {DRIVER}
    absent = []
    for name in sorted(wanted):
        if name in packaged:
            libraries[name] = read_library(packaged[name])
        else:
            try:
                ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            except OSError:
                absent.append(name)
    defined = frozenset[str]().union(*(library.defined for library in libraries.values()))
    undefined = frozenset[Symbol]().union(*(library.undefined for library in libraries.values()))
    system = ctypes.CDLL(None)
    return absent, sorted(symbol for symbol in undefined if symbol[0] not in defined and not hasattr(system, symbol[0]))


def main() -> int:
    """Write the stub next to torch's libraries; return the exit code."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        print("torch is not installed in this Python", file=sys.stderr)
        return 1
    torch = Path(spec.origin).parent
    libraries, symbols = missing(torch)
    (torch / "lib" / STUB).write_bytes(stub_library(STUB, symbols))
    for name in libraries:
        link = torch / "lib" / name
        link.unlink(missing_ok=True)
        link.symlink_to(STUB)
    print(f"stubbed {len(symbols)} functions of {', '.join(libraries) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
