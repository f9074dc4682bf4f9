"""`python -m rlrun.tracking --config run.json`: runs one worker per tracker, each in its own process group.

A worker that ends is restarted after a growing pause; one without progress for too long is killed first. Problems of a tracker do not
affect the run, and unsent records stay on the volume. After SIGTERM, the sink lets the workers send the remaining records until its starter
kills it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.run_config import RunConfig
from rlrun.protocol.files.durable import make_folder
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.processes import descriptors_in, on_sigterm, refuse_inspection
from rlrun.tracking.enabled import enabled_trackers
from rlrun.tracking.record_source import INTERVAL_SECONDS, SYSTEM_FILE, Machine
from rlrun.tracking.worker import ERROR_MARK

PATIENCE_SECONDS = 180.0
"""Time without progress after which a worker counts as hanging. It exceeds the libraries' own time limits of one call."""
START_SECONDS = 300.0
"""Longest time from a worker's start to its first progress, even if the roles use most of the processors."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0
LAST_TRIES = 2
_POLL_SECONDS = 0.2
_NICE = 19
"""Workers give way to the roles: next to a busy role they get a seventieth of a core."""


@dataclass
class Worker:
    """Worker of one tracker, running or waiting for a restart."""

    tracker: str
    command: Sequence[str]
    process: subprocess.Popen[str] | None = None
    pulse: int = -1
    """Reading end of the pipe that gets a byte after each progress of the worker."""
    progressed_at: float = 0.0
    has_progressed: bool = False
    """Whether the worker has reported progress since its start."""
    due: float = 0.0
    """Time of the next start."""
    failures: int = 0
    last_logged: str = ""
    """Last logged line. A reason is logged only once in a row."""
    last_tries: int = 0
    """Failures since the run's end, which are limited so that the end does not wait for an unreachable tracker."""
    done: bool = False
    failed: bool = False
    errors: Path = field(default_factory=Path)

    def start(self, now: float, *, once: bool) -> None:
        """Start the worker. With `once`, it ends after everything is sent."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*self.command, "--tracker", self.tracker, "--pulse", str(write), *(["--once"] if once else [])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(write, *(number for word in self.command for number in descriptors_in(Path(word)))),
                start_new_session=True,
                text=True,
            )
        os.close(write)
        self.pulse, self.progressed_at = read, now
        self.has_progressed = False

    def read_progress(self, now: float) -> None:
        """Read the progress of the worker."""
        with suppress(BlockingIOError):
            if os.read(self.pulse, 65536):
                self.failures = 0 if self.has_progressed else self.failures
                self.progressed_at, self.has_progressed = now, True

    def send_signal(self, number: int) -> None:
        """Send a signal: SIGKILL to the worker and its children, other signals only to the worker."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def poll_exit(self) -> int | None:
        """Return the exit code of a worker that has ended, once, and kill its children."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.send_signal(signal.SIGKILL)
        os.close(self.pulse)
        self.process = None
        return code

    def read_reason(self) -> str:
        """Return the reason that the worker reported, or the last line that was printed."""
        with suppress(OSError):
            lines = self.errors.read_text(errors="replace").strip().splitlines()
            own = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
            return [*lines[-1:], *own][-1] if lines else ""
        return ""


class Sink:
    """Workers of a run.

    Args:
        root: folder of the run.
        trackers: names of the trackers.
        command: command of a worker, without the tracker's name.
        say: function that logs a line.
        patience: seconds without progress after which a worker is killed.
        once: whether workers end after everything is sent.
    """

    def __init__(
        self,
        root: Path,
        trackers: Sequence[str],
        command: Sequence[str],
        *,
        say: Callable[[str], None],
        patience: float = PATIENCE_SECONDS,
        once: bool = False,
    ) -> None:
        self._say, self._patience, self._once = say, patience, once
        self._folder = root / "tracking"
        self._workers = [Worker(name, command, errors=self._folder / f"{name}.stderr") for name in trackers]
        self._machine = Machine(root)
        self._measure_at = 0.0
        self._stopping = False

    def check_workers(self, now: float) -> bool:
        """Check and restart the workers. Returns False after all of them are done."""
        if not self._once and not self._stopping and now >= self._measure_at:
            self._measure_at = now + INTERVAL_SECONDS
            self._write_measures()
        for worker in self._workers:
            self._check_worker(worker, now)
        return not all(worker.done for worker in self._workers)

    @property
    def failed(self) -> list[str]:
        """Trackers that have not received all records."""
        return [worker.tracker for worker in self._workers if worker.failed or not worker.done]

    def stop(self) -> None:
        """Let the workers send the remaining records and end."""
        self._stopping = True
        for worker in self._workers:
            worker.send_signal(signal.SIGTERM)

    def kill_workers(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.send_signal(signal.SIGKILL)
            if worker.process is not None:
                worker.process.wait()

    def _check_worker(self, worker: Worker, now: float) -> None:
        if worker.done:
            return
        # A worker between two processes waits until its restart is due.
        if worker.process is None:
            if now >= worker.due:
                self._start_worker(worker, now)
            return
        # A running worker is killed after too long a time without progress; the next check finds its exit and restarts it.
        worker.read_progress(now)
        code = worker.poll_exit()
        if code is None:
            patience = self._patience if worker.has_progressed else max(self._patience, START_SECONDS)
            if now - worker.progressed_at > patience:
                self._log_change(worker, f"no progress for {patience:.0f} s; the worker is restarted")
                worker.send_signal(signal.SIGKILL)
            return
        # The exit code of an ended worker decides: everything is sent, a restart is useless, or it is restarted.
        if code == exit_codes.OK:
            worker.done = True
        elif code == exit_codes.CONFIGURATION:
            self._log_change(worker, f"{worker.read_reason()}; the run continues without it")
            worker.done = worker.failed = True
        else:
            self._schedule_restart(worker, now, worker.read_reason() or f"its process ended with code {code}")

    def _start_worker(self, worker: Worker, now: float) -> None:
        try:
            make_folder(self._folder)
            # A worker that is still starting would miss the later SIGTERM, so `once` is passed on the command line.
            worker.start(now, once=self._once or self._stopping)
        except OSError as error:
            self._schedule_restart(worker, now, f"{error.filename or 'its process'}: {error.strerror}")

    def _schedule_restart(self, worker: Worker, now: float, why: str) -> None:
        worker.last_tries += self._stopping or self._once
        if worker.last_tries > LAST_TRIES:
            worker.done = worker.failed = True
        pause = min(FIRST_PAUSE_SECONDS * 2**worker.failures, LONGEST_PAUSE_SECONDS)
        worker.failures = min(worker.failures + 1, 16)
        worker.due = now + pause
        self._log_change(worker, why)

    def _log_change(self, worker: Worker, text: str) -> None:
        if text != worker.last_logged:
            self._say(f"{worker.tracker}: {text}")
        worker.last_logged = text

    def _write_measures(self) -> None:
        line = json.dumps({"time": time.time(), **self._machine.read_measures()}) + "\n"
        try:
            make_folder(self._folder)
            with (self._folder / SYSTEM_FILE).open("a") as file:
                file.write(line)
        except OSError as error:
            self._say(f"{SYSTEM_FILE}: cannot write a line: {error.strerror}")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the sink and return the exit code."""
    refuse_inspection()
    parser = argparse.ArgumentParser("rlrun.tracking")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--once", action="store_true", help="send all existing records, then end")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS)
    options = parser.parse_args(argv)
    asked: list[bool] = []
    on_sigterm(lambda: asked.append(True))
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM}
    )  # blocked by the starter until the handler is installed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal; the starter decides when the sink ends
    try:
        config = load_file(RunConfig, options.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    with suppress(OSError):
        os.nice(_NICE)
    trackers = enabled_trackers(config.tracking, environ)
    command = module_command("rlrun.tracking.worker", ["--config", str(options.config)])
    sink = Sink(
        Path(config.trainer.output_dir),
        trackers,
        command,
        say=lambda text: print(time.strftime("%H:%M:%S"), text, flush=True),
        patience=options.patience,
        once=options.once,
    )
    parent = os.getppid()
    try:
        stopped = False
        while sink.check_workers(time.monotonic()):
            if asked and not stopped:
                stopped = True
                sink.stop()
            if os.getppid() != parent:
                break  # the starter has ended; unsent records stay on the volume
            time.sleep(_POLL_SECONDS)
    finally:
        sink.kill_workers()
    return exit_codes.FAILURE if sink.failed else exit_codes.OK
