"""Keeper: the process between the orchestrator and an environment's process, which no process of the environment can leave.

The keeper is the subreaper of all its descendants: an orphan becomes its child, even if the orphan has changed its session or its
environment variables. Therefore the descendants of the keeper are always exactly the processes of the environment, and the keeper ends
after them. It runs no code of the environment. The parent of the environment's process is the keeper and not the orchestrator, so a
signal to the parent reaches only the keeper; where possible such signals are denied (see `signal_guard`). Linux only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress

from rlrun.diagnostics import stacks
from rlrun.environments.process.containment import signal_guard
from rlrun.environments.process.containment.kill import kill_descendants
from rlrun.runtime.processes import refuse_inspection

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
STACKS = signal.SIGUSR1
"""Signal that the keeper forwards to the environment's process, which then writes its main thread's stack to its log."""
_HEARD = (signal.SIGCHLD, signal.SIGTERM, STACKS)


def end_with(parent: int, number: signal.Signals) -> None:
    """Request a signal for the end of the parent, or exit immediately if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the request: the signal would never come
        os._exit(1)


def fork_kept(parent: int) -> None:
    """Fork: continue in the child, while this process becomes its keeper and never returns.

    Args:
        parent: pid of the orchestrator.
    """
    end_with(parent, signal.SIGTERM)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        end_with(keeper, signal.SIGKILL)
        if signal_guard.protect_ancestors(keeper):
            os.setsid()  # otherwise a signal to the child's own process group would reach the keeper
        return
    refuse_inspection()  # no filter limits the keeper's signals: a process that could write its memory could end the orchestrator
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    os.closerange(3, 1 << 20)
    _end_as(_keep_child(child))


def _keep_child(child: int) -> int:
    """Wait until the child has ended or this process has to end, and return the wait status to exit with."""
    while True:
        if (status := _reap_children(child)) is not None:
            break
        number = signal.sigwait(_HEARD)
        if number == STACKS:
            with suppress(OSError):  # the child has ended
                stacks.signal_main_thread(child, STACKS)
        elif number == signal.SIGTERM:
            status = int(signal.SIGTERM)
            break
    kill_descendants(os.getpid(), reap=lambda: _reap_children(child))
    return status


def _reap_children(child: int) -> int | None:
    """Collect all children that have ended, and return the wait status of `child` if it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_as(status: int) -> None:
    """Exit with the same status, or by the same signal, as another process."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):  # the handler of SIGKILL cannot be set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
