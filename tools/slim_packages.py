"""Smaller installed packages in a GPU image: a run loads the same code and data as before.

    python3 -m tools.slim_packages SITE

SITE is the folder site-packages. The program deletes the files of `UNUSED`, removes the debug sections of libraries, and
replaces copies of a file by hard links. It needs only Python, because the images' builds run it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.elf_file import ElfError, drop_debug_sections

UNUSED: Mapping[str, str] = {
    "triton/backends/nvidia/lib/cupti/*_static.a": "static libraries: Triton's profiler loads libcupti.so next to them",
    "nvidia/cu13/lib/libnvrtc*.alt.so.*": "second build of NVRTC with a name of its own: no library is linked with it, and no "
    "package has its name",
    "nvidia/cu13/lib/libcusolverMg.so.*": "solvers for several GPUs of one process: torch is linked with libcusolver only, and no "
    "package calls this one",
    "tokenspeed_triton/backends/amd/lib/libtriton_amd_codegen.so": "code for AMD GPUs: loaded when a kernel is compiled for one",
}
"""Deleted files below site-packages, with the reason. A pattern without a file is not an error: the trainer's image has a part of
the packages."""
MIN_LIBRARY_BYTES = 300_000
"""Smaller libraries are not read: all their debug sections together have less than 3 MB."""
MIN_LINKED_BYTES = 1_000_000
"""Smaller copies are not searched."""


def delete_unused(site: Path) -> int:
    """Delete the files of `UNUSED` and return their bytes."""
    saved = 0
    for pattern in UNUSED:
        for file in sorted(site.glob(pattern)):
            saved += file.stat().st_size
            file.unlink()
    return saved


def drop_debug(site: Path) -> int:
    """Remove the debug sections of all libraries and return the removed bytes.

    Raises:
        ElfError: the memory of a changed library would differ.
    """
    saved = 0
    for file in _large_files(site, MIN_LIBRARY_BYTES):
        with file.open("rb") as opened:
            if opened.read(6) != b"\x7fELF\x02\x01":
                continue
        before = file.read_bytes()
        try:
            after = drop_debug_sections(before)
        except ElfError as error:
            raise ElfError(f"{file}: {error}") from None
        if len(after) < len(before):
            saved += len(before) - len(after)
            file.write_bytes(after)
    return saved


def link_copies(site: Path) -> int:
    """Replace copies of a file by hard links and return the saved bytes. Wheels have no links, so they contain copies instead."""
    by_size: dict[int, list[Path]] = {}
    for file in _large_files(site, MIN_LINKED_BYTES):
        by_size.setdefault(file.stat().st_size, []).append(file)
    saved = 0
    first: dict[str, Path] = {}
    for size, files in by_size.items():
        for file in files if len(files) > 1 else ():
            kept = first.setdefault(hashlib.sha256(file.read_bytes()).hexdigest(), file)
            if kept is not file and not kept.samefile(file) and kept.stat().st_mode == file.stat().st_mode:
                file.unlink()
                os.link(kept, file)
                saved += size
    return saved


def _large_files(site: Path, least: int) -> Iterator[Path]:
    for file in sorted(site.rglob("*")):
        if file.is_file() and not file.is_symlink() and file.stat().st_size >= least:
            yield file


def main() -> int:
    """Change the packages in the folder. Returns the exit code."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python3 -m tools.slim_packages SITE", file=sys.stderr)
        return 64
    site = Path(sys.argv[1])
    steps = (("unused files", delete_unused), ("debug sections", drop_debug), ("copies of files", link_copies))
    try:
        for name, step in steps:
            print(f"{name}: {step(site) / 1e6:,.1f} MB less")
    except ElfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 65
    return 0


if __name__ == "__main__":
    sys.exit(main())
