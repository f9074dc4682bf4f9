"""Stub of the CUDA libraries: it can be loaded, and its functions return an error code."""

import ctypes
import platform
import sys
from pathlib import Path

import pytest

from tests.cluster.images.cuda_stubs import STUB, read_library, stub_library

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="torch's CUDA libraries are for x86-64 Linux here"
)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    file = tmp_path / STUB
    symbols = [
        ("cublasCreate_v2", "libcublas.so.13"),
        ("ncclInit", ""),
        ("both", "libcufft.so.12"),
        ("both", "libcublas.so.13"),
    ]
    file.write_bytes(stub_library(STUB, [*symbols, *((f"function_{index}", "") for index in range(3000))]))
    return file


def test_cuda_stub_functions_return_an_error(stub: Path) -> None:
    library = ctypes.CDLL(str(stub))
    names = ["cublasCreate_v2", "ncclInit", *(f"function_{index}" for index in range(3000))]
    assert {getattr(library, name)() for name in names} == {1}
    assert not hasattr(library, "function_3000")


def test_cuda_stub_has_requested_symbol_versions(stub: Path) -> None:
    library = ctypes.CDLL(str(stub))
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]

    def has(name: bytes, version: bytes) -> bool:
        return find(library._handle, name, version) is not None

    assert has(b"cublasCreate_v2", b"libcublas.so.13")
    assert not has(b"cublasCreate_v2", b"libcufft.so.12")
    assert has(b"both", b"libcufft.so.12")
    assert has(b"both", b"libcublas.so.13")


def test_shared_library_is_read_like_the_loader() -> None:
    math = next(
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/libm.so.6" in line
    )
    library = read_library(math)
    assert "libc.so.6" in library.needed
    assert "cos" in library.defined
    assert any(version.startswith("GLIBC_") for _, version in library.undefined)


def test_file_that_is_not_a_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ValueError, match=r"text\.so is no 64-bit"):
        read_library(tmp_path / "text.so")
