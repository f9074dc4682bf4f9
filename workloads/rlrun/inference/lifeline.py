"""Guarantee that no process of the engine outlives the server, however the server ends.

vLLM's engine core does not notice that the API server was killed with SIGKILL: it stays and keeps the GPU's memory. Therefore the server
leads its own process group, and a small watcher process in the group waits for the server's end and then kills the group. To stop a
server, send a signal to its pid only.
"""

from __future__ import annotations

import os
import select
import signal


def tie_children_to_this_process() -> None:
    """Make this process the leader of a new group that is killed when this process ends.

    Call this function before the first thread or child exists. Linux only (pidfd).
    """
    server = os.getpid()
    if os.getpgid(0) != server:
        os.setpgid(0, 0)
    # Opened before the fork, so that it refers to this process even if the pid is reused.
    pidfd = os.pidfd_open(server)
    if os.fork() != 0:
        os.close(pidfd)
        return
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A signal to the whole group stops the server; the watcher must end last.
        signal.signal(signum, signal.SIG_IGN)
    select.select([pidfd], [], [])
    # The group exists as long as this process is in it, so its id cannot be reused by another group.
    os.killpg(server, signal.SIGKILL)
    os._exit(0)
