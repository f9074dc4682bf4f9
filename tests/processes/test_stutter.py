"""Interrupted commands: normal exit code, and no process stays stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.stutter import Processes
from tests.support.programs import run_program, wait_for_exit

WORK = """
import json, os, subprocess, sys, time
code = "import time; print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env={})
child.stdout.readline()
def stopped(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "T"
late, seen, last = 0, 0, time.monotonic()
while not (late and seen):
    time.sleep(0.005)
    late += time.monotonic() - last > 0.1
    seen += stopped(child.pid)
    last = time.monotonic()
print(json.dumps([child.pid, late > 0, seen > 0]), flush=True)
sys.exit(7)
"""


def test_each_process_of_command_is_stopped_and_continued() -> None:
    command = [sys.executable, "-m", "tests.stutter", "--share", "0.3", "--most", "0.5", sys.executable, "-c", WORK]
    done = run_program(command)
    assert done.returncode == 7, done.stderr
    child, late, seen = json.loads(done.stdout)
    assert (late, seen) == (True, True)
    state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    subprocess.run(["kill", "-9", str(child)], check=True)
    assert state != "T", "what outlives the command runs"


def test_sigterm_reaches_command_and_no_process_stays_stopped() -> None:
    words = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    command = [sys.executable, "-m", "tests.stutter", "--share", "1", "--most", "0.2", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stuttering:
        assert stuttering.stdout is not None
        assert stuttering.stdout.readline() == "up\n"
        stuttering.terminate()
        assert wait_for_exit(stuttering) == -signal.SIGTERM % 256


def test_unknown_marker_finds_no_process() -> None:
    assert Processes("of nobody").look() == set()
