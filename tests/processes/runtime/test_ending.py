"""Repeated stop requests of helper processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from tests.support.programs import wait_for, wait_for_exit

ENDS = """
from rlrun.runtime.processes import Ending, on_sigterm
asked = Ending()
on_sigterm(asked.set)
print("up", flush=True)
while not asked.wait(0.01):
    pass
"""


def test_repeated_sigterm_does_not_change_exit() -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    while process.poll() is None:  # The loop also covers the interpreter's exit; a handler has time to return.
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert process.returncode == 0


STARTS = """
import subprocess, sys
from rlrun.runtime.processes import Ending, on_sigterm
asked = Ending()
on_sigterm(asked.set)
print("up", flush=True)
while not asked.wait(0.01):
    pass
later = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
later.stdout.readline()
later.terminate()
sys.exit(later.wait() + 15)
"""


def test_process_started_after_request_gets_own_signals() -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    try:
        assert wait_for_exit(process) == 0
    finally:
        process.kill()
        process.wait()


WAITS = """
import os, signal, sys
from rlrun.runtime.processes import Ending, on_sigterm
asked, heard = Ending(), 0
def ask():
    global heard
    heard += 1
    asked.set()
on_sigterm(ask)
print("up", flush=True)
while heard < 300:
    asked.wait(0)
print(asked.is_set())
"""


def test_requests_during_a_wait_do_not_block_it() -> None:
    """`threading.Event` waits for its own lock if a request arrives between two of its steps."""
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    def request_end() -> bool:
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    try:
        wait_for(request_end, "the end after 300 requests", poll_seconds=0.0)
    finally:
        process.kill()
    assert process.stdout.read() == "True\n"
