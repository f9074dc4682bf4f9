"""`python -m tools.flash_attention_3 INSTALLED FOLDER`: wheel of FlashAttention 3 from the library in a wheel of xformers.

FlashAttention 3 is on no public index with its backward pass, and its build takes a CUDA compiler and an hour. xformers 0.0.34 contains the
compiled library, linked by torch's stable ABI, which later versions of torch load. INSTALLED is a folder in which the packages of
requirements/images/flash-attention-3.txt are installed, by hash. The same input gives the same bytes. Needs only Python, because the
image's build runs it.

The library also contains code for older GPUs, 144 of 356 MB, which `trainer.attention` never selects: `BACKENDS` allows fa3 on
compute capability 9.x only. The wheel does not store it (`elf_file.punch_holes`).
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu.zero_fatbin import HOPPER, containers, is_kept, zero_other_architectures
from tools.elf_file import punch_holes

VERSION = "3.0.0+xformers.0.0.34"
WHEEL = f"flash_attn_3-{VERSION}-py3-none-manylinux_2_28_x86_64.whl"
SHA256 = "ce960b868c668c37964e704b95e80f83581a6a9d76c5ada626a6c78b6d9d3ab1"
"""Hash of the wheel."""
_INFO = f"flash_attn_3-{VERSION}.dist-info"
_TIME = (1980, 1, 1, 0, 0, 0)
_INTERFACE = '''"""Registers the operations of FlashAttention 3; its functions are not here."""
import flash_attn_3._C
'''
_PACKAGE = '''"""FlashAttention 3, with the CUDA runtime that it was linked with."""
import ctypes
import pathlib

import torch

ctypes.CDLL(str(pathlib.Path(__file__).with_name("libcudart.so.12")))
'''
_EXTENSION = '''"""Loads the library. It is not a module of Python: it only registers operations with torch."""
import pathlib

import torch

torch.ops.load_library(str(pathlib.Path(__file__).with_name("flash_attn_3.so")))
'''
_METADATA = f"""Metadata-Version: 2.4
Name: flash-attn-3
Version: {VERSION}
Summary: FlashAttention 3 for Hopper GPUs, from the wheel of xformers 0.0.34, without soft caps
License-Expression: BSD-3-Clause AND LicenseRef-NVIDIA-CUDA
License-File: LICENSE.xformers
License-File: LICENSE.cuda-runtime
Requires-Python: >=3.9
Requires-Dist: torch>=2.10
"""
_TAGS = """Wheel-Version: 1.0
Generator: rlrun
Root-Is-Purelib: false
Tag: py3-none-manylinux_2_28_x86_64
"""
LIBRARY = "flash_attn_3/flash_attn_3.so"
SOURCES: Mapping[str, str] = {
    LIBRARY: "xformers/flash_attn_3/_C.so",
    "flash_attn_3/libcudart.so.12": "nvidia/cuda_runtime/lib/libcudart.so.12",
    f"{_INFO}/licenses/LICENSE.xformers": "xformers-0.0.34.dist-info/licenses/LICENSE",
    f"{_INFO}/licenses/LICENSE.cuda-runtime": "nvidia_cuda_runtime_cu12-*.dist-info/licenses/License.txt",
}
"""Files of the wheel that are copied, with their paths in INSTALLED."""
TEXTS: Mapping[str, str] = {
    "flash_attn_interface.py": _INTERFACE,
    "flash_attn_3/__init__.py": _PACKAGE,
    "flash_attn_3/_C.py": _EXTENSION,
    f"{_INFO}/METADATA": _METADATA,
    f"{_INFO}/WHEEL": _TAGS,
}
"""Files of the wheel that are written here."""


class SourceError(Exception):
    """The folder does not contain the files of the locked packages."""


def read_files(installed: Path) -> dict[str, bytes]:
    """Return the files of the wheel, without its record.

    Args:
        installed: folder with the installed packages of requirements/images/flash-attention-3.txt.

    Raises:
        SourceError: a file is missing.
    """
    found = {name: text.encode() for name, text in TEXTS.items()}
    for name, source in SOURCES.items():
        paths = sorted(installed.glob(source))
        if len(paths) != 1:
            raise SourceError(
                f"{installed} contains {len(paths)} files {source}; install requirements/images/flash-attention-3.txt there"
            )
        found[name] = paths[0].read_bytes()
    return found


def keep_hopper(library: bytes) -> bytes:
    """Return the library without its code for other GPUs than Hopper; all other memory stays.

    Raises:
        ValueError: the library has an unknown format.
    """
    dropped = [
        (entry.start, entry.stop)
        for entries in containers(library)
        for entry in entries
        if not is_kept(entry, entries, HOPPER)
    ]
    return punch_holes(zero_other_architectures(library, HOPPER)[0], dropped)


def hopper_files(installed: Path) -> dict[str, bytes]:
    """Return the files of the wheel, the library with its code for Hopper only; arguments and errors as `read_files`, `keep_hopper`."""
    files = read_files(installed)
    return {**files, LIBRARY: keep_hopper(files[LIBRARY])}


def write_wheel(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write the wheel and return its path."""
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in sorted(files.items()))
    content = {**files, f"{_INFO}/RECORD": f"{record}{_INFO}/RECORD,,\n".encode()}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / WHEEL
    # Not compressed: the result does not depend on a version of zlib, and the wheel is installed at once and deleted.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(content.items()):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return target


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> int:
    """Write the wheel. Returns the exit code."""
    if len(sys.argv) != 3:
        print("usage: python -m tools.flash_attention_3 INSTALLED FOLDER", file=sys.stderr)
        return 64
    try:
        wheel = write_wheel(hopper_files(Path(sys.argv[1])), Path(sys.argv[2]))
        if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
            wheel.unlink()
            raise SourceError(f"{wheel} has the hash {found} instead of {SHA256}; install the packages by hash again")
        print(wheel)
    except (SourceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 66
    return 0


if __name__ == "__main__":
    sys.exit(main())
