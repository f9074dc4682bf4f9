"""Ways to inspect and change another process on x86-64; each raises `PermissionError` if it is refused."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.ptrace.restype = ctypes.c_long
_PTRACE, _VM_READ, _VM_WRITE, _KCMP, _PIDFD_OPEN, _PIDFD_GETFD = 101, 310, 311, 312, 434, 438
_ATTACH, _DETACH, _WALL = 16, 17, 0x40000000


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _call(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _read_file_way(name: str) -> Callable[[int], object]:
    def read(pid: int) -> object:
        with Path("/proc", str(pid), name).open("rb") as file:
            return file.read(0 if name == "mem" else 64)

    return read


def _write_file_way(name: str, text: str) -> Callable[[int], object]:
    return lambda pid: Path("/proc", str(pid), name).write_text(text)


def _list_folder_way(name: str) -> Callable[[int], object]:
    return lambda pid: len(os.listdir(f"/proc/{pid}/{name}"))  # noqa: PTH208


def _read_link_way(name: str) -> Callable[[int], object]:
    return lambda pid: os.readlink(f"/proc/{pid}/{name}")  # noqa: PTH115


def _open_descriptor(pid: int) -> object:
    for number in range(3):
        with suppress(FileNotFoundError):
            return os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK))
    raise AssertionError("it has none of the first three")


def _attach(pid: int) -> object:
    _call(_PTRACE, _ATTACH, pid, 0, 0)
    os.waitpid(pid, _WALL)
    _call(_PTRACE, _DETACH, pid, 0, 0)
    return "attached"


def _copy_memory_way(number: int) -> Callable[[int], object]:
    def copy(pid: int) -> object:
        buffer = ctypes.create_string_buffer(8)
        mine = _Part(ctypes.addressof(buffer), 8)
        try:
            return _call(number, pid, ctypes.byref(mine), 1, ctypes.byref(_Part(4096, 8)), 1, 0)
        except PermissionError:
            raise
        except OSError as error:  # The address is not mapped, but the access was allowed.
            return error.strerror

    return copy


def _take_descriptor(pid: int) -> object:
    descriptor = _call(_PIDFD_OPEN, pid, 0)
    try:
        return os.close(_call(_PIDFD_GETFD, descriptor, 0, 0))
    finally:
        os.close(descriptor)


def _compare_processes(pid: int) -> object:
    return _call(_KCMP, os.getpid(), pid, 1, 0, 0)


WAYS: dict[str, Callable[[int], object]] = {
    **{name: _read_file_way(name) for name in ("environ", "mem", "maps", "auxv", "io")},
    **{f"{name}/": _list_folder_way(name) for name in ("cwd", "root", "map_files")},
    **{f"link {name}": _read_link_way(name) for name in ("cwd", "root", "exe", "fd/0")},
    "a descriptor": _open_descriptor,
    "write mem": lambda pid: os.close(os.open(f"/proc/{pid}/mem", os.O_WRONLY)),
    "write oom_score_adj": _write_file_way("oom_score_adj", "1000"),
    "write coredump_filter": _write_file_way("coredump_filter", "255"),
    "process_vm_readv": _copy_memory_way(_VM_READ),
    "process_vm_writev": _copy_memory_way(_VM_WRITE),
    "pidfd_getfd": _take_descriptor,
    "kcmp": _compare_processes,
    "ptrace attach": _attach,
}
