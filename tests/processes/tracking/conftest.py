"""Sinks of runs' folders and their results."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlrun.runtime.processes import processes_with
from rlrun.tracking.sink_starter import before_exec
from tests.support.programs import finish
from tests.support.tracked_run import TrackedFolder

MARK = "RLRUN_TEST_SINK"


def needs(package: str) -> None:
    """Skip if a tracker's package is not installed, which `make install` does; fail in CI."""
    if importlib.util.find_spec(package) is None:
        assert not os.environ.get("CI"), f"{package} is not installed: `make install` installs it"
        pytest.skip(f"{package} IS NOT INSTALLED: run `make install`")


class SinkOf:
    """Sinks of one run, with all their processes."""

    def __init__(self, run: TrackedFolder) -> None:
        self.run = run
        self._started: list[subprocess.Popen[str]] = []

    @property
    def _mark(self) -> str:
        return str(self.run.paths.root)

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start the sink."""
        command = [sys.executable, "-m", "rlrun.tracking", "--config", str(self.run.paths.run_json), *options]
        environ = {**os.environ, MARK: self._mark}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True, preexec_fn=before_exec)
        self._started.append(process)
        return process

    def finish(self) -> str:
        """Send the remaining records; return the log of all sinks."""
        for process in self._started:
            process.terminate()
        log = "".join(finish(process)[0] for process in self._started)
        self._started = []
        return log

    def kill(self) -> None:
        """Kill the sink, its workers and their children, as a power failure does."""
        for pid in processes_with(MARK, self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.kill()
            finish(process)
        self._started = []

    def sent(self, tracker: str) -> int:
        """Return the number of records in the tracker's journal."""
        with suppress(FileNotFoundError):
            text = (self.run.paths.root / "tracking" / f"{tracker}.sent").read_text()
            return sum(not line.startswith("=") for line in text.splitlines())
        return 0


@pytest.fixture
def sink_of(tmp_path: Path) -> Iterator[Callable[..., SinkOf]]:
    """Factory of a run's folder and its sinks."""
    made: list[SinkOf] = []

    def make(trackers: dict[str, object], **more: int) -> SinkOf:
        made.append(SinkOf(TrackedFolder(tmp_path / "run", trackers, **more)))
        return made[-1]

    yield make
    for sink in made:
        sink.kill()
