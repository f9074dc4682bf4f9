"""The sink as a child process of the program that starts a run's roles: it is restarted when it ends, and stopped last."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlrun.config.models.run_config import RunConfig
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.process_logs import cut_back
from rlrun.runtime.processes import descriptor_path, seal_file
from rlrun.tracking.backends.tracker_packages import missing_trackers
from rlrun.tracking.enabled import enabled_trackers

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
DRAIN_SECONDS = 20.0
"""Longest time that the end of a run waits for trackers."""
_PAUSE_SECONDS = 5.0
_KEEP_SECONDS = 1.0
_LOG_BYTES = 1024 * 1024


def log_file(root: Path) -> Path:
    """Return the log file of a run's sink."""
    return root / "tracking" / "sink.log"


def before_exec() -> None:
    """Prepare the sink's process: it gets SIGTERM when its starter ends, and SIGTERM is blocked until its handler is installed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class SinkProcess:
    """Child process next to a run: the sink, or another program with the same life cycle. No method raises, and only `stop` waits.

    Each start of the program reads a sealed copy of the configuration. Otherwise an environment that changes the file and ends the program
    could choose the server to which its keys are sent.

    Args:
        config: configuration file of the run. It is read here, before an environment runs.
        root: folder of the run.
        environ: environment variables of the program.
        module: module of the program, which accepts `--config` and `--once`.
        log: log of the program's output. Default: the sink's log.
    """

    def __init__(
        self,
        config: Path,
        root: Path,
        environ: Mapping[str, str],
        *,
        module: str = "rlrun.tracking",
        log: Path | None = None,
    ) -> None:
        self._sealed = -1
        with suppress(OSError):  # the program itself reports a missing file
            self._sealed = seal_file(config.read_bytes())
            config = descriptor_path(self._sealed)
        self._command = module_command(module, ["--config", str(config)])
        self._log, self._environ = log or log_file(root), dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._done = False

    def keep_running(self) -> None:
        """Start the program if it is not running. Call it periodically."""
        if self._done:
            return
        if self._process is not None:
            cut_back(self._log, _LOG_BYTES)
            code = self._process.poll()
            if code is None:
                return
            self._process, self._due = None, time.monotonic() + _PAUSE_SECONDS
            self._done = code > 0  # the program reported that it cannot work; a negative code means that it was killed
        elif time.monotonic() >= self._due:
            self._start_process()

    def _start_process(self, *options: str) -> None:
        self._due = time.monotonic() + _PAUSE_SECONDS
        with suppress(OSError):  # the volume is full or the process limit is reached: `keep_running` retries
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._command, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environ,
                    start_new_session=True,
                    preexec_fn=before_exec,
                    pass_fds=() if self._sealed < 0 else (self._sealed,),
                )

    def stop(self, *, seconds: float = DRAIN_SECONDS, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Let the program send the remaining records, then end it. Returns whether everything was sent.

        Args:
            seconds: time limit.
            hurry: function that ends the wait as soon as it returns True.
        """
        if self._done:
            return False
        self._done = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        else:  # the end of a container can kill the program before this call, so it is started again for the remaining records
            self._process = None
            self._start_process("--once")
        process = self._process
        if process is None:
            return False
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)
        complete = process.poll() == 0
        if process.poll() is None:
            process.kill()  # its workers then end at their next write to the pipe
        with suppress(OSError):
            process.wait()
        if self._sealed >= 0:
            os.close(self._sealed)
            self._sealed = -1
        return complete


@contextmanager
def sink_beside(
    config: RunConfig, file: Path, environ: Mapping[str, str], *, say: Callable[[str], None], hurry: Callable[[], bool]
) -> Iterator[None]:
    """Feed the run's trackers, if it has any, during the `with` block in a pod. A thread restarts the sink.

    Args:
        config: configuration of the run.
        file: file with this configuration.
        environ: environment variables of the sink.
        say: function that logs a line.
        hurry: function that ends the wait for the remaining records as soon as it returns True.
    """
    if config.tracking is None or not enabled_trackers(config.tracking, environ):
        yield
        return
    for name, message in missing_trackers(config.tracking, environ, in_image=True):
        say(f"tracking.{name} {message}; the run continues without it")
    root = Path(config.trainer.output_dir)
    sink = SinkProcess(file, root, environ)
    try:
        with kept_beside(sink):
            yield
    finally:
        if not sink.stop(hurry=hurry) and not hurry():
            say(
                f"some records have not reached the trackers, see {log_file(root)}; the next attempt or `rlrun track` sends them"
            )


@contextmanager
def kept_beside(sink: SinkProcess) -> Iterator[None]:
    """Restart a sink from a thread during the `with` block."""
    over = threading.Event()

    def keep_running() -> None:
        while not over.wait(_KEEP_SECONDS):
            sink.keep_running()

    thread = threading.Thread(target=keep_running, name="beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_KEEP_SECONDS)
