"""Packages of GPU images become smaller: unused files, copies, libraries that cannot be changed."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from tools.elf_file import ElfError
from tools.slim_packages import (
    MIN_LIBRARY_BYTES,
    MIN_LINKED_BYTES,
    UNUSED,
    delete_unused,
    drop_debug,
    link_copies,
    main,
)


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_only_listed_files_are_deleted(tmp_path: Path) -> None:
    unused = [write_file(tmp_path / pattern.replace("*", "x"), b"12345") for pattern in UNUSED]
    used = [
        write_file(tmp_path / name, b"1")
        for name in (
            "triton/backends/nvidia/lib/cupti/libcupti.so",
            "nvidia/cu13/lib/libnvrtc.so.13",
            "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
            "nvidia/cu13/lib/libcusolver.so.12",
            "nvidia/cu13/lib/libcudart_static.a",
        )
    ]
    assert delete_unused(tmp_path) == 5 * len(UNUSED)
    assert not any(path.exists() for path in unused)
    assert all(path.exists() for path in used)
    assert delete_unused(tmp_path) == 0, "the second layer has none of them"


def test_copies_become_one_file_and_other_files_stay(tmp_path: Path) -> None:
    content = bytes(MIN_LINKED_BYTES)
    first, second = (write_file(tmp_path / name, content) for name in ("a/libz.so", "b/libz.so.1"))
    other = write_file(tmp_path / "b/other.so", b"1" + content[1:])
    program = write_file(tmp_path / "b/program", content)
    program.chmod(0o755)
    small = [write_file(tmp_path / name, b"small") for name in ("c", "d")]
    assert link_copies(tmp_path) == MIN_LINKED_BYTES
    assert first.samefile(second)
    assert first.read_bytes() == second.read_bytes() == content
    assert not program.samefile(first), "the copy may be run"
    assert not other.samefile(first)
    assert not small[0].samefile(small[1])
    assert link_copies(tmp_path) == 0


def test_library_that_cannot_be_changed_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header = bytearray(b"\x7fELF\x02\x01" + bytes(MIN_LIBRARY_BYTES))
    struct.pack_into("<H", header, 0x36, 32)  # rows of program headers of a 32-bit file
    library = write_file(tmp_path / "package/library.so", bytes(header))
    text = write_file(tmp_path / "package/text", b"x" * MIN_LIBRARY_BYTES)
    with pytest.raises(ElfError, match=r"package/library\.so: rows of 32"):
        drop_debug(tmp_path)
    monkeypatch.setattr(sys, "argv", ["slim_packages", str(tmp_path)])
    assert main() == 65
    assert "library.so" in capsys.readouterr().err
    library.unlink()
    assert main() == 0
    assert text.read_bytes() == b"x" * MIN_LIBRARY_BYTES
    monkeypatch.setattr(sys, "argv", ["slim_packages", str(tmp_path / "absent")])
    assert main() == 64
