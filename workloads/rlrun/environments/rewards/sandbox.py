"""Code that runs inside the sandbox for programs that a model wrote. It is a script for a Python without site packages.

Three mechanisms limit the program. They need no privileges, are applied in this order and cannot be removed:

- Resource limits: processor time, address space, size of a file, open files.
- Landlock: files of the Python installation can be read, and no file can be written, created, renamed or removed.
- A seccomp filter with a list of the system calls that a computing program needs; files can be opened only for reading. The list has no
  call for sockets, processes, signals to others, tracing or a change of rights. A call that is not in the list fails with EPERM.

The filter is a list of allowed calls, so calls of future kernels are rejected. Sources: landlock(7), seccomp(2), Linux'
`asm/unistd_64.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
import sys

UNAVAILABLE = 99
"""Exit code of a machine that cannot confine the code. The reason is on stderr."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, REFER = 1 << 2, 1 << 13
"""Landlock rights: read a file, and move a file into another folder."""
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
CHANGE_FOLDERS = sum(1 << right for right in range(4, 13))
"""Landlock rights: remove files and folders, and create each kind of them."""
SCOPE_SIGNAL = 1 << 1
"""Landlock scope, from version 6 (Linux 6.12): no signals to processes outside of the domain."""
_READ = READ_FILE | 1 << 3  # READ_DIR
_OF_FILES = 1 | 1 << 1 | READ_FILE | 1 << 14  # EXECUTE, WRITE_FILE, TRUNCATE: the rights that apply to single files
_AUDIT_ARCH_X86_64, _X32_BIT = 0xC000003E, 0x40000000
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD = 0x10000

ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17,
    "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28,
    "dup": 32, "dup2": 33, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89,
    "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "newfstatat": 262,
    "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "eventfd2": 290,
    "epoll_create1": 291, "pipe2": 293, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
"""Calls that are allowed with all arguments, with their numbers on x86-64."""
_OPEN, _OPENAT, _FCNTL, _IOCTL, _CLONE, _CLONE3, _TGKILL, _PRLIMIT = 2, 257, 72, 16, 56, 435, 234, 302
_CHANGES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
"""Flags of `open` that write, create or empty a file. Access mode 3 neither reads nor writes, but empties the file with O_TRUNC:
Landlock before its version 3 (Linux 6.2) requires no right for it."""
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicate and flags, but not F_SETOWN, which sends signals
_IOCTL_COMMANDS = (0x5401, 0x5451, 0x541B, 0x5413)  # TCGETS, FIOCLEX, FIONREAD, TIOCGWINSZ


class UnavailableError(Exception):
    """Error for a machine that cannot confine the code."""


def filter_program(pid: int) -> list[tuple[int, int, int, int]]:
    """Return the seccomp filter as classic BPF instructions, `(code, jump if true, jump if false, operand)`.

    Args:
        pid: pid of this process, the only one to which the code may send signals.
    """
    load_number = (_LOAD, 0, 0, _NUMBER)
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_ARCH_X86_64), (_RETURN, 0, 0, _KILL), load_number]
    program += [(_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]

    def allow_if(number: int, argument: int, tests: list[tuple[int, int, int, int]]) -> None:
        # The tests load the argument's lower half; the kernel also uses only this half for these calls. Each test jumps to the end.
        body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
        program.append((_EQUAL, 0, len(body), number))
        program.extend(body)

    def one_of(values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        return [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]

    for number, argument in ((_OPEN, 1), (_OPENAT, 2)):
        allow_if(number, argument, [(_ANY_BIT, 0, 1, _CHANGES)])
    allow_if(_FCNTL, 1, one_of(_FCNTL_COMMANDS))
    allow_if(_IOCTL, 1, one_of(_IOCTL_COMMANDS))
    allow_if(_CLONE, 0, [(_ANY_BIT, 1, 0, _CLONE_THREAD)])
    allow_if(_TGKILL, 0, one_of((pid,)))
    allow_if(_PRLIMIT, 0, one_of((0,)))
    # The filter cannot read the flags of clone3, so it reports ENOSYS; the C library then uses clone, whose flags are an argument.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    for number in sorted(ALLOWED.values()):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _EPERM)]


def _check_call(result: int, what: str) -> int:
    if result < 0:
        raise UnavailableError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_version(libc: ctypes.CDLL) -> int:
    """Return the version of the kernel's Landlock, from 1.

    Raises:
        UnavailableError: the kernel has no Landlock.
    """
    libc.syscall.restype = ctypes.c_long
    return _check_call(libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "this kernel has no Landlock (Linux 5.13 or newer)")


def restrict_files(libc: ctypes.CDLL, handled: int, allowed: list[tuple[str, int]], *, scoped: int = 0) -> None:
    """Remove rights to files from this process and its future children, except for listed paths.

    Args:
        libc: C library.
        handled: removed rights, as Landlock bits.
        allowed: files or folders (with their contents) and the rights that are kept for them. Missing paths are skipped.
        scoped: scopes, as Landlock bits. Kernels with Landlock before version 6 do not support scopes.

    Raises:
        UnavailableError: the kernel rejected the rules.
    """
    rules = struct.pack("=QQQ", handled, 0, scoped) if scoped else struct.pack("=Q", handled)
    ruleset = _check_call(libc.syscall(_LANDLOCK_CREATE, rules, len(rules), 0), "landlock_create_ruleset")
    for path, rights in allowed:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        access = rights if stat.S_ISDIR(os.fstat(place).st_mode) else rights & _OF_FILES
        rule = struct.pack("=Qi", access, place)
        _check_call(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule for {path}")
        os.close(place)
    _check_call(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _landlock_rules(libc: ctypes.CDLL, readable: list[str]) -> None:
    # Landlock 1 has all rights except moving between folders (2) and truncating (3); the seccomp filter rejects every form of both.
    abi = landlock_version(libc)
    rights = 13 + min(2, abi - 1)
    restrict_files(libc, (1 << rights) - 1, [(path, _READ) for path in readable])


def install_filter(libc: ctypes.CDLL, program: list[tuple[int, int, int, int]]) -> None:
    """Apply a seccomp filter to this process and its future children.

    Raises:
        UnavailableError: the kernel rejected the filter.
    """
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    _check_call(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0), "seccomp")


def confine_process(*, cpu_seconds: int, memory_bytes: int) -> None:
    """Apply resource limits, Landlock and the seccomp filter to this process.

    Raises:
        UnavailableError: the machine does not support one of them; then the program must not be run.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise UnavailableError(f"the sandbox supports Linux on x86-64, not {sys.platform} on {platform.machine()}")
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    _check_call(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _landlock_rules(libc, [sys.base_prefix, "/usr/lib", "/lib", "/lib64", "/dev/null", "/dev/urandom"])
    install_filter(libc, filter_program(os.getpid()))


def main() -> None:
    """Run the program of a file descriptor: `sandbox.py DESCRIPTOR CPU_SECONDS MEMORY_BYTES`."""
    descriptor, cpu_seconds, memory_bytes = map(int, sys.argv[1:])
    with os.fdopen(descriptor, "rb") as file:
        code = file.read()
    try:
        confine_process(cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        sys.exit(UNAVAILABLE)
    sys.argv = ["program.py"]
    exec(compile(code, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


if __name__ == "__main__":
    main()
