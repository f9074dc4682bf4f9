"""Waits for programs: a stalled program fails its test, with its state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import waiting
from tests.support.programs import cpu_seconds, finish, run_program, wait_for_exit
from tests.support.waiting import PATIENCE, StalledError, wait_until

CHILD_STOPS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
print("last line", flush=True)
print(child.pid, file=sys.stderr, flush=True)
child.wait()
"""
IMPATIENT_SECONDS = 0.5


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_program_returns_code_and_output() -> None:
    code = "import sys; print(sys.stdin.read().upper()); print('why', file=sys.stderr); sys.exit(7)"
    done = run_program([sys.executable, "-c", code], input="text")
    assert (done.returncode, done.stdout, done.stderr) == (7, "TEXT\n", "why\n")
    with pytest.raises(subprocess.CalledProcessError):
        run_program([sys.executable, "-c", code], input="text", check=True)


def test_stopped_program_fails_with_state_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CHILD_STOPS], text=True, **pipes) as process:
        assert process.stderr is not None
        child = int(process.stderr.readline())
        wait_until(lambda: is_stopped(child), "the child stops itself")
        monkeypatch.setattr(waiting, "PATIENCE_SECONDS", IMPATIENT_SECONDS)
        with pytest.raises(StalledError) as failed:
            finish(process)
        monkeypatch.undo()
        assert f"{child} stopped, " in str(failed.value), "the state of each process"
        assert str(failed.value).endswith("output:\nlast line\n")
        wait_until(lambda: has_ended(child) and process.poll() is not None, "the tree is killed")


def test_wait_for_exit_reports_and_keeps_stopped_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(waiting, "PATIENCE_SECONDS", IMPATIENT_SECONDS)
        with pytest.raises(StalledError, match=r"(?s)stopped.*its log"):
            wait_for_exit(process, state=lambda: "its log")
        monkeypatch.undo()
        assert process.poll() is None
        process.kill()
        assert wait_for_exit(process) == -signal.SIGKILL


@pytest.mark.parametrize("works", ["sum(range(1000))", "print(1, flush=True); time.sleep(0.05)"])
def test_program_that_computes_or_writes_makes_progress(
    works: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ends after three different snapshots of its progress."""
    enough, seen = tmp_path / "enough", set[object]()

    def poll(self: waiting.Wait) -> None:
        assert self.progress is not None
        seen.add(self.progress())
        if len(seen) >= 3:
            enough.touch()

    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", IMPATIENT_SECONDS)
    monkeypatch.setattr(waiting.Wait, "poll", poll)
    code = f"import pathlib, time\nwhile not pathlib.Path({str(enough)!r}).exists(): {works}"
    assert run_program([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("end", [finish, wait_for_exit])
def test_sleeping_program_makes_no_progress(
    end: Callable[[subprocess.Popen[bytes]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def poll(self: waiting.Wait) -> None:
        assert self.progress is not None
        seen.append(self.progress())
        if len(seen) == 3:
            process.kill()

    monkeypatch.setattr(waiting.Wait, "poll", poll)
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as process:
        end(process)
    assert len(set(seen)) == 1


def test_cpu_time_contains_children_that_have_ended() -> None:
    before = cpu_seconds(os.getpid())
    run_program([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert cpu_seconds(os.getpid()) - before >= 0.25  # Sum of ticks of 0.01 s, each rounded down.
    assert cpu_seconds(2**22 + 1) == 0.0, "a process that does not exist"


def test_variable_sets_patience() -> None:
    code = "from tests.support.waiting import PATIENCE_SECONDS; print(PATIENCE_SECONDS)"
    assert run_program([sys.executable, "-c", code], env={**os.environ, PATIENCE: "7"}).stdout == "7.0\n"
