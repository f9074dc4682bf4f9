"""The trainer's pods as one group over plain TCP, which lives or dies as a whole.

    pod k -> pod 0   {"attempt": 2, "pod": 1}     repeated until the welcome; pods of another attempt get none
    pod 0 -> pod k   welcome | step 7 | finished | stopped
    pod k -> pod 0   done 7                       pod 0 trains step 7 after all pods have sent this
    pod k -> pod 0   stop                         a signal requested a stop: the group stops after pod 0 has saved

A connection that ends early means that the other side is gone. The kernel's keep-alive detects a machine without power.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from loguru import logger

from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.endpoints import RENDEZVOUS_PORT
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.stop import Stop

JOIN_SECONDS = 1800.0
"""Longest wait for all pods: images are pulled, nodes start."""
RETRY_SECONDS = 0.2
HELLO_SECONDS = 10.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # gone after 20 s of silence


def read_place() -> tuple[int, int]:
    """Return ordinal of this pod and the number of pods.

    Raises:
        RoleError: `RLRUN_NNODES` or `RLRUN_POD_NAME` is wrong.
    """
    nodes, name = os.environ.get("RLRUN_NNODES", "1"), os.environ.get("RLRUN_POD_NAME", "")
    if not nodes.isdecimal() or int(nodes) < 1:
        raise RoleError(f"RLRUN_NNODES has to be the number of trainer pods, from 1; got {nodes!r}", exit_codes.USAGE)
    if int(nodes) == 1:
        return 0, 1
    ordinal = name.rpartition("-")[2]
    if not ordinal.isdecimal() or int(ordinal) >= int(nodes):
        raise RoleError(
            f"RLRUN_POD_NAME has to end in the pod's ordinal, 0 to {int(nodes) - 1}; got {name!r}", exit_codes.USAGE
        )
    return int(ordinal), int(nodes)


def master() -> tuple[str, int]:
    """Return the address of pod 0.

    Raises:
        RoleError: `RLRUN_MASTER_ADDR` or `RLRUN_MASTER_PORT` is missing or wrong.
    """
    address = os.environ.get("RLRUN_MASTER_ADDR", "")
    port = os.environ.get("RLRUN_MASTER_PORT", str(RENDEZVOUS_PORT))
    if not address or not port.isdecimal():
        raise RoleError(
            f"RLRUN_MASTER_ADDR and RLRUN_MASTER_PORT have to say where pod 0 listens; got {address!r} and {port!r}",
            exit_codes.USAGE,
        )
    return address, int(port)


class Line:
    """A connection for lines of text."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, text: str) -> None:
        """Send one line; `receive` notices a lost connection."""
        try:
            self._connection.sendall(f"{text}\n".encode())
        except OSError:
            return

    def receive(self) -> str | None:
        """Return the next line, or None if the other side is gone."""
        try:
            line = self._file.readline()
        except OSError:
            return None
        return line.decode(errors="replace").rstrip("\n") if line.endswith(b"\n") else None

    def patient(self) -> None:
        """Wait without a deadline from now on."""
        self._connection.settimeout(None)

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._connection.close()


class Leader:
    """Pod 0's side.

    Args:
        attempt: attempt of the accepted pods.
        pods: number of pods of the group; 1 opens no port.
        port: port to listen on.
        lost: function called in a separate thread with a message if a pod is gone.
        asked: function called in a separate thread if a pod has to stop.

    Raises:
        RoleError: the port is in use, or not all pods came in time.
    """

    def __init__(
        self, attempt: int, pods: int, port: int, lost: Callable[[str], None], asked: Callable[[], None]
    ) -> None:
        self._lost, self._asked, self._lines = lost, asked, dict[int, Line]()
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._over = False
        if pods > 1:
            try:
                listener = socket.create_server(("", port), backlog=pods)
            except OSError as error:
                message = f"the group's port: cannot listen on {port}: {error.strerror}"
                raise RoleError(message, exit_codes.UNAVAILABLE) from None
            with listener:
                self._gather(listener, attempt, pods)

    def _gather(self, listener: socket.socket, attempt: int, pods: int) -> None:
        logger.info(f"waiting for {pods - 1} more trainer pods")
        deadline = time.monotonic() + JOIN_SECONDS
        while len(self._lines) < pods - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, pods)) - set(self._lines))
                raise RoleError(f"trainer pods {missing} did not come within {JOIN_SECONDS:.0f} s") from None
            connection.settimeout(HELLO_SECONDS)
            line = Line(connection)
            hello = _hello(line.receive())
            if hello.get("attempt") != attempt or hello.get("pod") not in range(1, pods):
                line.close()
                continue
            pod = int(hello["pod"])
            if pod in self._lines:
                self._lines[pod].close()  # the pod has ended and its successor connects
            self._lines[pod] = line
        for pod, line in self._lines.items():
            line.patient()
            line.send("welcome")
            threading.Thread(target=self._listen, args=(pod, line), name=f"pod {pod}", daemon=True).start()

    def _listen(self, pod: int, line: Line) -> None:
        while (answer := line.receive()) is not None:
            if answer == "stop":
                self._asked()
            else:
                self._answers.put(answer)
        if not self._over:
            self._lost(f"trainer pod {pod} is gone")

    def together(self, step: int) -> None:
        """Let all pods take part in a step; return once they have done so."""
        for line in self._lines.values():
            line.send(f"step {step}")
        for _ in self._lines:
            self._answers.get()

    def finish(self, *, stopped: bool = False) -> None:
        """Announce to the other pods that all steps are trained, or that the group stops here."""
        self._over = True
        for line in self._lines.values():
            line.send("stopped" if stopped else "finished")


def _hello(text: str | None) -> dict[str, int]:
    try:
        document = json.loads(text or "")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def follow(
    attempt: int, pod: int, address: str, port: int, take_part: Callable[[int], None], stop: Stop, grace_seconds: float
) -> bool:
    """Run a later pod's side; return when pod 0 has finished: True, or False if the group was stopped.

    Args:
        attempt: this attempt.
        pod: this pod's ordinal.
        address: address of pod 0.
        port: port of pod 0.
        take_part: function called with 0 once the group is complete, then with each step.
        stop: stop request of a signal.
        grace_seconds: time that pod 0 may take to save after that.

    Raises:
        RoleError: pod 0 does not answer, or is gone before it has finished.
    """
    line = _join(attempt, pod, address, port)
    logger.info(f"pod {pod} is in the group of {address}:{port}")
    take_part(0)
    stop.allow_time(grace_seconds)
    stop.call_after_request(lambda: line.send("stop"))
    while (text := line.receive()) is not None:
        if text in ("finished", "stopped"):
            line.close()
            return text == "finished"
        step = int(text.removeprefix("step "))
        take_part(step)
        line.send(f"done {step}")
    raise RoleError("trainer pod 0 is gone")


def _join(attempt: int, pod: int, address: str, port: int) -> Line:
    deadline, reason = time.monotonic() + JOIN_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=HELLO_SECONDS)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(RETRY_SECONDS)
            continue
        line = Line(connection)
        line.patient()  # pod 0 answers once all pods have connected
        line.send(json.dumps({"attempt": attempt, "pod": pod}))
        if line.receive() == "welcome":
            return line
        line.close()
        reason = "it let this pod not in: another attempt runs there"
        time.sleep(RETRY_SECONDS)
    raise RoleError(f"cannot join the trainer pod 0 at {address}:{port} within {JOIN_SECONDS:.0f} s: {reason}")
