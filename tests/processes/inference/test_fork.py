"""Engines forked from their server: the condition for a fork, and resources of the server that the engine must not keep."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rlrun.inference.engine_processes import may_fork
from rlrun.inference.engine_settings import InferenceSettings
from tests.support.programs import run_program

FORKED = """
import multiprocessing, os, signal, socket, sys, types
sys.modules["torch"] = types.SimpleNamespace(set_num_threads=lambda number: None)
utils = types.SimpleNamespace()
sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm.v1": types.ModuleType("vllm.v1")}
sys.modules["vllm.v1.engine"] = types.SimpleNamespace(core=None, utils=utils)
from rlrun.inference.engine_processes import fork_the_engine
read, write = socket.socketpair()
write.setblocking(False)
signal.set_wakeup_fd(write.fileno())
signal.signal(signal.SIGUSR1, lambda *_: None)
listener = socket.create_server(("127.0.0.1", 0))
inode = os.fstat(listener.fileno()).st_ino
held = lambda: inode in [os.stat(f"/proc/self/fd/{number}").st_ino for number in range(64) if os.path.exists(f"/proc/self/fd/{number}")]
fork_the_engine(listener)

def engine():
    signal.raise_signal(signal.SIGUSR1)
    os._exit(8 if held() else 7)

process = utils.get_mp_context().Process(target=engine)
process.start()
process.join()
read.setblocking(False)
try:
    heard = read.recv(16)
except BlockingIOError:
    heard = b""
print(type(process).__name__, process.exitcode, heard, held())
"""


def make_settings(**changes: Any) -> InferenceSettings:
    common = {
        "model_path": "/m",
        "served_model_name": "m",
        "weights_dir": "/w",
        "api_key": "a-long-key",
        "device": "cpu",
    }
    return InferenceSettings(**(common | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"device": "cuda"}, False),
        ({"cpu_threads": 2}, False),
        ({"tensor_parallel": 2}, False),
        ({"data_parallel": 2}, False),
    ],
)
def test_only_single_thread_cpu_engine_is_forked(changes: dict[str, Any], expected: bool) -> None:
    assert may_fork(make_settings(**changes)) is expected


def test_forked_engine_has_no_listener_and_own_signals() -> None:
    done = run_program([sys.executable, "-c", FORKED])
    assert done.stdout == "ForkProcess 7 b'' True\n", done.stderr
