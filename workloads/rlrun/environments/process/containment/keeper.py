"""The process between the orchestrator and an environment's own: nothing that the environment starts can leave it.

It is the subreaper of all that descends from it: a process whose parent ended becomes its child, whatever that did to its session or
its environment variables. So the descendants of the keeper are all processes of the environment, at any time, and it ends when they
have. It runs no code of the environment. To signal one's parent is to signal the keeper, not the orchestrator, and is refused where the
machine can do so (see `signal_guard`). Linux only.
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
"""Passed on to the environment's process, which then writes what its main thread does into its log, even while it computes."""
_HEARD = (signal.SIGCHLD, signal.SIGTERM, STACKS)


def end_with(parent: int, number: signal.Signals) -> None:
    """Get a signal when the parent ends; exit at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the line above: no signal would come
        os._exit(1)


def fork_kept(parent: int) -> None:
    """Go on in a child of this process, which keeps it and never returns.

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
            os.setsid()  # a signal to its own group is not to reach the keeper either
        return
    refuse_inspection()  # no filter keeps it from signals: who could write its memory could end the orchestrator
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    os.closerange(3, 1 << 20)
    _end_as(_keep_child(child))


def _keep_child(child: int) -> int:
    """Wait until the child has ended, or this is to end; returns the wait status to end with."""
    while True:
        if (status := _reap_children(child)) is not None:
            break
        number = signal.sigwait(_HEARD)
        if number == STACKS:
            with suppress(OSError):  # it has ended
                stacks.signal_main_thread(child, STACKS)
        elif number == signal.SIGTERM:
            status = int(signal.SIGTERM)
            break
    kill_descendants(os.getpid(), reap=lambda: _reap_children(child))
    return status


def _reap_children(child: int) -> int | None:
    """Collect all children that have ended; the wait status of `child` if it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_as(status: int) -> None:
    """End in the way in which another process did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):  # of SIGKILL
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
