"""Guarantee that no process of the engine outlives the server, however the server dies.

vLLM's engine core does not notice that the API server was killed with SIGKILL: it stays, with the GPU's memory. So the
server leads a process group of its own, and a small process of that group waits for the server's end and then kills
the group. To stop a server, signal its pid; its children need no attention.
"""

from __future__ import annotations

import os
import select
import signal


def tie_children_to_this_process() -> None:
    """Make this process the leader of a new group that is killed when this process ends.

    Call it before the first thread or child exists. Linux only (pidfd).
    """
    server = os.getpid()
    if os.getpgid(0) != server:
        os.setpgid(0, 0)
    # Opened before the fork: it names this process even if the pid is used again.
    pidfd = os.pidfd_open(server)
    if os.fork() != 0:
        os.close(pidfd)
        return
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A signal to the whole group asks the server to stop; the watcher leaves last.
        signal.signal(signum, signal.SIG_IGN)
    select.select([pidfd], [], [])
    # The group exists as long as this process is in it, so its id cannot belong to anybody else.
    os.killpg(server, signal.SIGKILL)
    os._exit(0)
