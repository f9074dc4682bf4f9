"""Processes of an engine: start by fork, and end together with the server.

A CPU engine is forked from the server, which has already imported everything that the engine needs. vLLM uses spawn on CPU, because OpenMP
threads do not survive a fork; with one thread there are none. Importing vLLM once instead of twice saves about 8 s of CPU time per start,
all of it before the first token.

No process of an engine outlives its server, however the server ends. vLLM's engine core does not notice that the API server was killed with
SIGKILL: it stays and keeps the GPU's memory. Therefore the server leads its own process group, and a small watcher process in the group
waits for the server's end and then kills the group. To stop a server, send a signal to its pid only.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket

from rlrun.diagnostics import heap
from rlrun.inference.engine_settings import InferenceSettings


def may_fork(settings: InferenceSettings) -> bool:
    """Return whether the engine is a single process that computes on the CPU with one thread."""
    one_process = settings.tensor_parallel == 1 and settings.data_parallel == 1
    return settings.device == "cpu" and settings.cpu_threads == 1 and one_process


def fork_the_engine(listener: socket.socket) -> None:
    """Make vLLM fork the engine instead of spawning it.

    Args:
        listener: listening socket of the server. The engine closes its copy, so that the port is free as soon as the server ends.
    """
    with heap.without_collector():
        import torch
        from vllm.v1.engine import core, utils  # noqa: F401  the engine's own modules: it finds them in place

    def leave_the_servers_alone() -> None:
        listener.close()
        # The other end of the wakeup descriptor is the server's event loop: signals to the engine must not reach it.
        signal.set_wakeup_fd(-1)
        # Set while there is one thread: torch's pool does not survive the fork, and two concurrent threads cannot replace it.
        torch.set_num_threads(1)

    os.register_at_fork(after_in_child=leave_the_servers_alone)
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


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
