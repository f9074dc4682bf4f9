"""Fork of a CPU engine's process from the server, which has imported everything that the engine needs.

vLLM spawns it on CPU, because OpenMP's threads do not survive a fork. With one thread there are none. Importing vLLM once
instead of twice saves about 8 s of CPU time of each start, all of them before the first token.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket

from rlrun.diagnostics import heap
from rlrun.inference.settings import InferenceSettings


def may_fork(settings: InferenceSettings) -> bool:
    """True if the engine is a single process that computes on the CPU with one thread."""
    one_process = settings.tensor_parallel == 1 and settings.data_parallel == 1
    return settings.device == "cpu" and settings.cpu_threads == 1 and one_process


def fork_the_engine(listener: socket.socket) -> None:
    """Make this process fork the engine from now on.

    Args:
        listener: the server's own; the engine closes its copy, so that the port is free as soon as the server has ended.
    """
    with heap.without_collector():
        import torch
        from vllm.v1.engine import core, utils  # noqa: F401  the engine's own modules: it finds them in place

    def leave_the_servers_alone() -> None:
        listener.close()
        # The server's event loop listens at the other end: a signal to the engine is not one to the server.
        signal.set_wakeup_fd(-1)
        # While there is one thread: torch's pool does not survive the fork, and two threads at once fail to replace it.
        torch.set_num_threads(1)

    os.register_at_fork(after_in_child=leave_the_servers_alone)
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
