"""Protection of a process from others of the same user: its variables, memory, descriptors and folders.

An environment's code runs as the user of the orchestrator that starts it. By default the kernel lets a user look into all processes of
theirs: `/proc/PID/environ`, `mem`, `fd`, `cwd` and `root`, ptrace, process_vm_readv, pidfd_getfd. A process that is not dumpable is
closed to them all (ptrace(2), "Ptrace access mode checking"; PR_SET_DUMPABLE(2const)); to root, with CAP_SYS_PTRACE, it is open. It
writes no core file. A program that it starts begins dumpable again, so only processes whose memory holds a secret call this. Linux only.
"""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def refuse_inspection() -> None:
    """Keep all other processes without rights of root from looking into this one and those that it forks, from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
