"""Reports of crashed processes: thread, stack and exit in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlrun.diagnostics import stacks
from rlrun.protocol.files.failures import telling_lines
from tests.support.programs import run_program

CRASHES_BESIDE_THREADS = """
    import ctypes, threading
    from rlrun.diagnostics import stacks
    stacks.record_crashes("rank-1")
    def waits():
        threading.Event().wait()
    def publish():
        ctypes.string_at(0)
    for _ in range(12):
        threading.Thread(target=waits, daemon=True).start()
    publish()
"""
NATIVE = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/opt/rlrun/trainer/weights/hf_writer.py", line 3 in publish

Extension modules: numpy.core (total: 1)
"""


def run_code(code: str, folder: Path | str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, stacks.FOLDER_VARIABLE: str(folder), "PYTHONFAULTHANDLER": "1"}
    return run_program([sys.executable, "-c", textwrap.dedent(code)], env=environment)


def test_crashed_thread_precedes_younger_waiting_threads(tmp_path: Path) -> None:
    done = run_code(CRASHES_BESIDE_THREADS, tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr == "", "nothing of it is mixed with what others write to the shared log"
    lines = telling_lines(stacks.crash_report(tmp_path, "rank-1"))
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert lines[1].startswith("Current thread")
    assert "in string_at" in lines[2]
    assert "in publish" in lines[3]


def test_crash_in_native_thread_is_reported_as_native_code() -> None:
    lines = telling_lines("step 1\n" + NATIVE)
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert "native code" in lines[1]
    assert "in publish" in lines[3]
    assert len(lines) == 4, "the list of modules says nothing"


def test_main_thread_precedes_native_threads_in_report() -> None:
    worker = 'Thread 0x01 (most recent call first):\n  File "thread.py", line 81 in _worker\n'
    empty = "".join(f"Thread 0x1{i} (most recent call first):\n  <no Python frame>\n" for i in range(20))
    main = 'Thread 0x99 (most recent call first):\n  File "step.py", line 7 in step\n  File "main.py", line 1 in main\n'
    lines = telling_lines(
        f"Fatal Python error: Segmentation fault\n\n{worker}{empty}{main}\nExtension modules: x (total: 1)\n"
    )
    assert "native code" in lines[1]
    assert lines[2:] == [*main.splitlines(), *worker.splitlines()]


def test_process_without_stacks_folder_writes_crash_to_stderr(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", ""):
        done = run_code(CRASHES_BESIDE_THREADS, folder)
        assert "Fatal Python error: Segmentation fault" in done.stderr
    assert stacks.crash_report(tmp_path, "rank-1") == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-11, "was ended by SIGSEGV"),
        (139, "was ended by SIGSEGV"),
        (137, "was ended by SIGKILL (often for lack of memory)"),
        (-35, "was ended by signal 35"),
        (65, "ended with exit code 65"),
        (0, "ended with exit code 0"),
        (255, "ended with exit code 255"),
    ],
)
def test_describe_end_names_exit_codes_and_signals(code: int, words: str) -> None:
    assert stacks.describe_end(code) == words
