"""Stack dumps of a running process, which must continue to run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlrun.diagnostics import stacks
from rlrun.environments.process.containment import keeper

QUESTIONS = 400
"""A process that also dumped its other threads crashed within the first 21 requests."""
BUSY = """
import os, threading, time
from rlrun.environments.process import worker
worker._set_limits(1 << 34)

def deep(count):
    return deep(count - 1) + 1 if count else sum(i for i in range(20))

def churn():
    while True:
        thread = threading.Thread(target=deep, args=(30,))
        thread.start()
        thread.join()

def waits_in_the_main_thread():
    print("up", flush=True)
    while True:
        time.sleep(0.001)

for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
waits_in_the_main_thread()
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts and ends threads continuously."""
    environment = {**os.environ, stacks.FILE_VARIABLE: str(tmp_path / "stacks")}
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [stacks.SIGNAL, keeper.STACKS])
def test_process_survives_repeated_stack_requests(
    busy: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 60.0)
    for _ in range(QUESTIONS):
        os.kill(busy.pid, number)
        time.sleep(0.001)
    assert busy.poll() is None
    if number == stacks.SIGNAL:
        assert (
            "in waits_in_the_main_thread"
            in stacks.request_stacks([busy.pid], tmp_path / "stacks", why="a test").decode()
        )
