"""A helper that has done its work is not killed by a second request to end."""

from __future__ import annotations

import signal
import subprocess
import sys

ENDS = """
import threading
from rlrun.runtime.ending import on_first_sigterm
asked = threading.Event()
on_first_sigterm(asked.set)
print("up", flush=True)
while not asked.wait(0.01):
    pass
"""


def test_requests_after_the_first_one_do_not_change_how_a_process_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    while process.poll() is None:  # while the interpreter ends, too
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
