"""The sink as a child process of what starts a run's roles: started again when it ends, and asked to end last."""

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

from rlrun.config.models.run import RunConfig
from rlrun.runtime.bootstrap import module_command
from rlrun.runtime.bounded_log import cut_back
from rlrun.runtime.processes import descriptor_path, seal_file
from rlrun.tracking.backends.missing import missing_trackers
from rlrun.tracking.enabled import enabled_trackers

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
DRAIN_SECONDS = 20.0
"""Longest time that the end of a run waits for trackers."""
_PAUSE_SECONDS = 5.0
_KEEP_SECONDS = 1.0
_LOG_BYTES = 1024 * 1024


def log_file(root: Path) -> Path:
    """Log of a run's sink."""
    return root / "tracking" / "sink.log"


def before_exec() -> None:
    """Prepare the sink's process: asked to end, it ends with its starter; it sees a signal that comes while it starts later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class SinkProcess:
    """The sink of a run, or another program that lives beside it in the same way. Nothing here raises, and nothing but `stop` waits.

    The program reads a sealed copy of the configuration, each time that it is started: an environment that could change the file and end
    the program would else choose where its keys are sent.

    Args:
        config: the run's configuration file; it is read here, before an environment runs.
        root: the run's folder.
        environ: the sink's environment.
        module: the program; takes `--config` and `--once`.
        log: what it prints; default: the sink's.
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
        with suppress(OSError):  # the program reports a file that is not there
            self._sealed = seal_file(config.read_bytes())
            config = descriptor_path(self._sealed)
        self._command = module_command(module, ["--config", str(config)])
        self._log, self._environ = log or log_file(root), dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._done = False

    def keep(self) -> None:
        """Start the sink where it does not run; called now and then."""
        if self._done:
            return
        if self._process is not None:
            cut_back(self._log, _LOG_BYTES)
            code = self._process.poll()
            if code is None:
                return
            self._process, self._due = None, time.monotonic() + _PAUSE_SECONDS
            self._done = code > 0  # no tracker can work, as it has said; otherwise somebody has ended it
        elif time.monotonic() >= self._due:
            self._start()

    def _start(self, *options: str) -> None:
        self._due = time.monotonic() + _PAUSE_SECONDS
        with suppress(OSError):  # a full volume, or no more processes: tried again
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
        """Have the rest sent, and end the sink. True if the trackers have everything.

        Args:
            seconds: longest time for it.
            hurry: ends this time early as soon as it is true.
        """
        if self._done:
            return False
        self._done = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        else:  # what looks after a container has ended it with all other processes
            self._process = None
            self._start("--once")
        process = self._process
        if process is None:
            return False
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)
        complete = process.poll() == 0
        if process.poll() is None:
            process.kill()  # its workers end with it: they see it by the next byte that they write
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
    """Feed the run's trackers, if it has any, while the block runs in a pod; a thread looks after the sink.

    Args:
        config: the run's.
        file: the same, as the sink reads it.
        environ: the sink's environment.
        say: logs a line.
        hurry: ends the time for the rest early.
    """
    if config.tracking is None or not enabled_trackers(config.tracking, environ):
        yield
        return
    for name, message in missing_trackers(config.tracking, environ, in_image=True):
        say(f"tracking.{name} {message}; the run goes on without it")
    root = Path(config.trainer.output_dir)
    sink = SinkProcess(file, root, environ)
    try:
        with kept_beside(sink):
            yield
    finally:
        if not sink.stop(hurry=hurry) and not hurry():
            say(
                f"not everything has reached the trackers, see {log_file(root)}; the next attempt or `rlrun track` sends the rest"
            )


@contextmanager
def kept_beside(sink: SinkProcess) -> Iterator[None]:
    """Have a thread look after a sink while the block runs."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(_KEEP_SECONDS):
            sink.keep()

    thread = threading.Thread(target=keep, name="beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_KEEP_SECONDS)
