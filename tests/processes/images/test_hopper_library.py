"""FlashAttention 3 with the code of one GPU: the loaded library has this code and zeros instead of the other one."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path

from benchmarks.gpu.zero_fatbin import MACHINE_CODE, PTX, containers
from tools.flash_attention_3 import keep_hopper

OLD_BYTES, HOPPER_BYTES = 300_000, 200_000
ASSEMBLER = """
.section .nv_fatbin, "a"
.align 8
.globl fatbin
fatbin:
.incbin "fatbin.bin"
.section .note.GNU-stack, "", @progbits
"""


def container() -> bytes:
    body = b"".join(
        struct.pack("<HHIQ12xI", kind, 0x101, 32, len(payload), architecture) + payload
        for kind, architecture, payload in (
            (PTX, 80, b"p" * OLD_BYTES),
            (MACHINE_CODE, 80, b"a" * OLD_BYTES),
            (MACHINE_CODE, 90, b"h" * HOPPER_BYTES),
        )
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_loaded_library_has_code_of_hopper_only(tmp_path: Path) -> None:
    fatbin = container() * 2
    (tmp_path / "fatbin.bin").write_bytes(fatbin)
    (tmp_path / "fatbin.s").write_text(ASSEMBLER)
    subprocess.run(["gcc", "-shared", "-o", "whole.so", "fatbin.s"], cwd=tmp_path, check=True)
    library = (tmp_path / "whole.so").read_bytes()
    smaller = keep_hopper(library)
    assert len(library) - len(smaller) > 4 * OLD_BYTES - 6 * 4096, "of each dropped part at most two pages stay"
    (tmp_path / "hopper.so").write_bytes(smaller)
    loaded = ctypes.string_at(
        ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(tmp_path / "hopper.so"), "fatbin")), len(fatbin)
    )
    expected = bytearray(fatbin)
    start = library.index(fatbin)
    for entries in containers(library):
        for entry in entries:
            if entry.architecture == 80:
                expected[entry.start - start : entry.stop - start] = bytes(entry.stop - entry.start)
    assert loaded == expected
    assert loaded.count(b"h") == 2 * HOPPER_BYTES
    assert loaded.count(b"a") == loaded.count(b"p") == 0
