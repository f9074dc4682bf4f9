"""Seccomp filter that denies signals from an environment to its keeper, to the orchestrator and their ancestors, and to all processes.

Calls that send signals fail with EPERM for these targets. So do calls that make the kernel send signals: setting the owner of a
descriptor, a limit of processor time, and a process descriptor from /proc. All 32-bit calls are denied, because they would bypass the
filter.

The filter is installed only if the kernel accepts it without disabling set-user-id programs (`no_new_privs`): in a pod without
privilege escalation, or as root; on x86-64. On other machines only the keeper is between an environment and the orchestrator, and an
environment can kill it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

from rlrun.environments.rewards.sandbox import UnavailableError, install_filter

_AUDIT_ARCH_X86_64 = 0xC000003E
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
_LOAD, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_X32_BIT = 0x40000000
_KILL = 62
_OTHERS = (129, 200, 234, 297, 434, 302)
"""rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo, pidfd_open, prlimit64: their first argument is a process, never a group."""
_FCNTL, _IOCTL, _PIDFD_SEND_SIGNAL = 72, 16, 424
_OWNER_COMMANDS = {_FCNTL: (8, 15), _IOCTL: (0x8901, 0x8902)}
"""F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP: set the receiver of a descriptor's signals, which can be any signal."""

Instruction = tuple[int, int, int, int]


def _refuse_if_one_of(argument: int, values: list[int]) -> list[Instruction]:
    """Return the end of a program, which denies a call if the lower half of an argument (an int) is one of the values."""
    body = [(_LOAD, 0, 0, argument), *((_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values))]
    return [*body, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]


def signal_filter(processes: set[int], groups: set[int]) -> list[Instruction]:
    """Return the filter as classic BPF instructions, `(code, jump if true, jump if false, operand)`.

    Args:
        processes: pids to which signals are denied.
        groups: process groups to which signals are denied.
    """
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, _EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]
    program += [(_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _EPERM)]
    # The descriptor of this call may come from /proc/PID instead of pidfd_open.
    program += [(_EQUAL, 0, 1, _PIDFD_SEND_SIGNAL), (_RETURN, 0, 0, _EPERM)]
    for call, commands in _OWNER_COMMANDS.items():
        body = _refuse_if_one_of(_SECOND_ARGUMENT, list(commands))
        program += [(_EQUAL, 0, len(body), call), *body]
    targets = [
        *sorted(processes),
        *((-group) & 0xFFFFFFFF for group in sorted(groups)),
        0xFFFFFFFF,
    ]  # the last is -1: all processes
    calls = (_KILL, *_OTHERS)
    program += [(_EQUAL, len(calls) - i, 0, number) for i, number in enumerate(calls)]
    return [*program, (_RETURN, 0, 0, _ALLOW), *_refuse_if_one_of(_FIRST_ARGUMENT, targets)]


def ancestor_pids(pid: int) -> set[int]:
    """Return a process and all its visible ancestors."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def protect_ancestors(keeper: int) -> bool:
    """Deny this process and its future children to signal the keeper and its ancestors. Return whether the machine supports it.

    Args:
        keeper: pid of the keeper, whose parent is the orchestrator. This process is still in the keeper's process group and must leave it.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    processes = ancestor_pids(keeper)
    groups = set()
    for pid in processes:
        with suppress(OSError):
            groups.add(os.getpgid(pid))
    try:
        install_filter(ctypes.CDLL(None, use_errno=True), signal_filter(processes, groups - {0}))
    except UnavailableError:
        return False
    return True
