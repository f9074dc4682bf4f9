"""Connection from the orchestrator to an environment in another container.

The host of that container starts, monitors and ends the environment's process like `life`; this module only connects to it. When the
container ends, the connection ends, too. A new connection works after the kubelet has restarted the container.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import stat
from contextlib import suppress
from dataclasses import asdict
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path

from rlrun.environments.process.life import PING_LOOKS, Command, Limits
from rlrun.environments.process.log import Log
from rlrun.environments.process.talk import Death, Ready, StartError, Talk
from rlrun.environments.process.wire import Document, WireError

KNOCK_SECONDS = 0.5
"""Time between two attempts to connect to the host."""
LOAD_MARGIN_SECONDS = 5.0
"""Time that the host has, after its own deadline for loading an environment, to report the failure."""
LOG_BYTES = 1024 * 1024
"""Limit of output that waits to be written to the log. More output is dropped, because the event loop must not wait for a disk."""


class Remote(Talk):
    """One connection.

    Args:
        socket: socket of the host.
        command: environment to start.
        limits: resource limits of the environment.
        log: log for the environment's output.
        number: number of this life; see `Talk`.
    """

    def __init__(self, socket: Path, command: Command, limits: Limits, log: Log, number: int = 1) -> None:
        super().__init__(command.id, number)
        self._socket, self._command, self._limits, self._log = socket, command, limits, log
        self._log_pipe = -1
        """Pipe to the thread that writes the log, or -1 if it is closed."""
        self._metrics = {"memory_gib": 0.0, "stall_seconds": 0.0}
        self._pings = itertools.count(1)
        self._pinging: asyncio.Task[None] | None = None
        self._answered_at = 0.0
        """Time of the last answer to a ping, on the event loop's clock."""

    async def start(self) -> Ready:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.start_seconds
        # The kubelet may still be starting the container, so the connection is retried until the deadline.
        while True:
            try:
                _check_socket(self._socket)
                await loop.create_unix_connection(lambda: self._wire, str(self._socket))
                break
            except OSError as error:
                if loop.time() >= deadline:
                    reason = f"no container answered at {self._socket} within {self._limits.start_seconds:g} seconds"
                    raise StartError(f"{reason} ({error.strerror})") from error
            await asyncio.sleep(KNOCK_SECONDS)
        self._open_log()
        asked = {"id": self._command.id, "args": dict(self._command.args), "limits": asdict(self._limits)}
        if self._command.given is not None:
            asked |= {"variables": dict(self._command.given), "withheld": sorted(self._command.withheld)}
        self._wire.send({"op": "load", "python": self._command.python, **asked})
        # Wait for the answer a little longer than the host itself does, so that the host's own reason is reported.
        waiting: set[asyncio.Future[Ready] | asyncio.Future[Death]] = {self._ready, self.ended}
        limit = self._limits.start_seconds + LOAD_MARGIN_SECONDS
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self._pinging = loop.create_task(self._ping_host())
            return self._ready.result()
        self.end()
        if self.ended.done():
            raise StartError(f"its process {self.ended.result().message} while loading")
        raise StartError(f"it did not load within {self._limits.start_seconds:g} seconds")

    def end(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        self._wire.close()  # the host then ends the environment
        self._close_log()

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    async def _ping_host(self) -> None:
        """Ping the host until canceled. A host that does not answer for `hang_seconds` counts as dead."""
        loop = asyncio.get_running_loop()
        self._answered_at = loop.time()
        looks = 0
        while True:
            # This process itself may be delayed, so the host has to miss several pings before its silence counts.
            self._wire.send({"op": "ping", "number": next(self._pings)})
            heard = self._answered_at
            await asyncio.sleep(self._limits.look_seconds)
            looks = 0 if self._answered_at != heard or self._wire.busy else looks + 1
            silent = loop.time() - self._answered_at
            if looks >= PING_LOOKS and silent > self._limits.hang_seconds:
                self._report_end(
                    Death("hang", f"was in a container whose first process did not answer for {silent:.1f} s")
                )
                self.end()

    def _handle_pong(self, document: Document) -> None:
        self._answered_at = asyncio.get_running_loop().time()
        self._metrics = {name: float(document["metrics"][name]) for name in self._metrics}

    def _open_log(self) -> None:
        reading, self._log_pipe = os.pipe()
        with suppress(OSError):  # above the user's limit, the pipe keeps its default size
            fcntl(self._log_pipe, F_SETPIPE_SZ, LOG_BYTES)
        os.set_blocking(self._log_pipe, False)
        self._log.follow(reading)

    def _close_log(self) -> None:
        if self._log_pipe >= 0:
            os.close(self._log_pipe)
            self._log_pipe = -1

    def _print(self, text: str) -> None:
        """Write output of the environment, one byte per character, to its log."""
        if self._log_pipe >= 0:
            with suppress(BlockingIOError):
                os.write(self._log_pipe, text.encode("latin-1"))

    def _handle(self, document: Document) -> None:
        if document["op"] == "log":
            self._print(str(document["text"]))
            return
        if document["op"] == "died":
            self._report_end(Death(document["kind"], str(document["message"]), int(document.get("rollout", 0))))
            self.end()
            return
        super()._handle(document)

    def _on_connection_lost(self, error: WireError | None) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        why = "was in a container that ended" if error is None else f"broke the protocol ({error})"
        if not self._ready.done():
            why += ", or refused the connection"
        self._report_end(Death("crash", why))
        self._close_log()


def _check_socket(path: Path) -> None:
    """Reject a link: the container that owns the folder could redirect the orchestrator to the socket of another container.

    Raises:
        OSError: the path does not exist, or is not a socket.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
