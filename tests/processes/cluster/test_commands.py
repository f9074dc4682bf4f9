"""Commands of a cold start: their ends and their cleanup."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import ClusterError
from tests.cluster.cache import locked
from tests.cluster.preparation import commands
from tests.cluster.preparation.entry import INTERRUPTED, report_errors
from tests.cluster.preparation.together import run_together
from tests.cluster.progress import Progress, wait_until

SILENT = Progress(lambda _: None)


@pytest.fixture(autouse=True)
def commands_allowed() -> Iterator[None]:
    yield
    commands.allow_all()


class Sleeper:
    """A shell that has started a child process and waits for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / "pid"
        self.script = f"sleep 1000 & echo $! >{self._file}.new; mv {self._file}.new {self._file}; wait"

    def run(self) -> int:
        """Run it as a command of a cold start."""
        return commands.run(["sh", "-c", self.script], self.folder / "log", progress=SILENT, name="sleeper")

    def wait_started(self) -> None:
        """Wait until its child runs."""
        wait_until(self._file.exists, "the child to start", timeout=120)

    def wait_gone(self) -> None:
        """Wait until its child has ended."""
        status = Path("/proc", self._file.read_text().strip(), "status")
        wait_until(lambda: not status.exists() or "\nState:\tZ" in status.read_text(), "the child to end", timeout=120)


def test_command_reports_its_exit_status_and_keeps_its_output(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo out; echo error >&2; exit 3"]
    assert commands.run(command, tmp_path / "new" / "log", progress=SILENT, name="x") == 3
    assert (tmp_path / "new" / "log").read_text() == "out\nerror\n"


def test_command_over_its_timeout_is_killed(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"^thing: sleep ran longer than 0 s: see .*log$"):
        commands.run(["sleep", "1000"], tmp_path / "log", progress=SILENT, name="thing", timeout=0.1)


def test_failed_job_stops_the_commands_of_the_other(tmp_path: Path) -> None:
    sleeper = Sleeper(tmp_path)

    def fail() -> int:
        sleeper.wait_started()
        raise ClusterError("image trainer: no")

    with pytest.raises(ClusterError, match=r"^image trainer: no$"):
        run_together({"programs": sleeper.run, "images": fail})
    sleeper.wait_gone()
    assert commands.run(["true"], tmp_path / "log", progress=SILENT, name="x") == 0, "the next try works"


def test_failed_job_stops_another_that_waits_for_a_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    waits = threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.set()
        yield

    def wait_for_lock() -> int:
        with locked("binary-kube", waiting=waiting()):
            raise AssertionError("another job holds the lock")

    def fail() -> int:
        assert waits.wait(120)
        raise ClusterError("image trainer: no")

    with locked("binary-kube"), pytest.raises(ClusterError, match=r"^image trainer: no$"):
        run_together({"programs": wait_for_lock, "images": fail})
    assert commands.run(["true"], tmp_path / "log", progress=SILENT, name="x") == 0, "no job is left"


def test_command_that_ignores_interrupts_is_killed(tmp_path: Path) -> None:
    sleeper = Sleeper(tmp_path)
    sleeper.script = f"trap '' INT; {sleeper.script}"
    stopper = threading.Thread(target=lambda: (sleeper.wait_started(), commands.stop_all()))
    stopper.start()
    with pytest.raises(commands.StoppedError):
        sleeper.run()
    stopper.join(120)
    sleeper.wait_gone()


def test_jobs_run_in_parallel_and_return_results() -> None:
    meeting = threading.Barrier(2)

    def job(result: str) -> str:
        meeting.wait(120)
        return result

    assert run_together({"a": lambda: job("1"), "b": lambda: job("2")}) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_commands_and_is_one_message(tmp_path: Path, number: signal.Signals) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    program = (
        "import signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored if a shell started the tests in the background
        "from tests.processes.cluster.test_commands import Sleeper, report_errors, run_together\n"
        "jobs = {folder: Sleeper(Path(folder)).run for folder in sys.argv[1:]}\n"
        "sys.exit(report_errors(lambda: len(run_together(jobs)), interrupted='interrupted'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, folders)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for folder in folders:
        Sleeper(folder).wait_started()
    process.send_signal(number)
    assert process.communicate(timeout=120)[1] == "interrupted\n"
    assert process.returncode == INTERRUPTED
    for folder in folders:
        Sleeper(folder).wait_gone()


def test_full_disk_is_one_message_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    def fill() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/bin/kube")

    assert report_errors(fill) == 1
    assert capsys.readouterr().err.startswith(
        "error: /cache/bin/kube: a disk is full: free some space, or set RLRUN_CACHE"
    )
