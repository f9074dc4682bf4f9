"""Bundle of FlashAttention 3 for a machine without a network: `python -m benchmarks.gpu.pack_fa3 WHEELS ARCHIVE`.

WHEELS holds a wheel of xformers with `flash_attn_3/_C.so` (the last is 0.0.34), which torch's stable ABI lets later versions of torch load,
and one of CUDA 12's runtime, which it is linked with. The archive holds the library, the runtime, and the module by which the trainer finds
them; 107 MB of the wheel are 37 MB in it.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

INTERFACE = '''"""Registers the operations of FlashAttention 3; its functions are not here."""
import flash_attn_3._C
'''
PACKAGE = '''"""FlashAttention 3, with the CUDA runtime that it was linked with."""
import ctypes
import pathlib

ctypes.CDLL(str(pathlib.Path(__file__).with_name("libcudart.so.12")))
'''
METADATA = "Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0+xformers.0.0.34\n"


def main(wheels: Path, archive: Path) -> None:
    """Write the archive."""
    content = {
        "flash_attn_interface.py": INTERFACE.encode(),
        "flash_attn_3/__init__.py": PACKAGE.encode(),
        "flash_attn_3/_C.abi3.so": _member(wheels, "xformers-*.whl", "xformers/flash_attn_3/_C.so"),
        "flash_attn_3/libcudart.so.12": _member(
            wheels, "nvidia_cuda_runtime_cu12-*.whl", "nvidia/cuda_runtime/lib/libcudart.so.12"
        ),
        "flash_attn_3-3.0.0.dist-info/METADATA": METADATA.encode(),
    }
    with tarfile.open(archive, "w:xz", preset=9) as target:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            target.addfile(member, io.BytesIO(data))


def _member(wheels: Path, pattern: str, name: str) -> bytes:
    (wheel,) = wheels.glob(pattern)
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
