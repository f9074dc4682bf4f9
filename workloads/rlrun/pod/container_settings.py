"""Settings and signals of a container.

The operator passes the settings in the container's environment. SIGTERM and SIGINT are forwarded to the role's process, or end a
wait of this process. Both are always handled, because the kernel has no default action for signals to the first process of a container.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rlrun.config.models.file_mark import VARIABLE
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.endpoints import RENDEZVOUS_PORT
from rlrun.runtime import exit_codes
from rlrun.runtime.processes import Ending

KEY_VARIABLE = "RLRUN_API_KEY"
_ORDINAL = re.compile(r"-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """Settings of one container."""

    config: Path
    """`RLRUN_CONFIG`: the resolved configuration of all roles."""
    attempt: int
    """`RLRUN_ATTEMPT`, from 1."""
    api_key: str
    """`RLRUN_API_KEY`: the run's secret."""
    pod_name: str
    """`RLRUN_POD_NAME`."""
    config_mark: str | None = None
    """`RLRUN_CONFIG_MARK`: hash of the part of `config` that the pod uses; None: not set."""
    pod_ip: str | None = None
    """`RLRUN_POD_IP`; None: not set, then roles listen on all addresses."""
    nodes: int = 1
    """`RLRUN_NNODES`: number of trainer pods."""
    master_addr: str = "127.0.0.1"
    """`RLRUN_MASTER_ADDR`: the trainer's first pod."""
    master_port: int = RENDEZVOUS_PORT
    """`RLRUN_MASTER_PORT`: port of torchrun's store on that pod."""
    state: Path = Path("/run/rlrun")
    """`RLRUN_POD_STATE`: volume with the lifetime of the pod."""
    termination_log: Path = Path("/dev/termination-log")
    """`RLRUN_TERMINATION_LOG`: file whose content Kubernetes copies to the container's status."""

    @property
    def ordinal(self) -> int:
        """Number at the end of a StatefulSet pod's name.

        Raises:
            RoleError: the name has no number.
        """
        found = _ORDINAL.search(self.pod_name)
        if found is None:
            raise RoleError(
                f"RLRUN_POD_NAME is {self.pod_name!r}; a trainer's pod ends with '-' and its ordinal", exit_codes.USAGE
            )
        return int(found[1])


def settings_from_environment(env: Mapping[str, str]) -> PodSettings:
    """Return the settings in the environment.

    Raises:
        RoleError: a variable is missing or invalid; the message names it.
    """
    return PodSettings(
        config=Path(_required_variable(env, "RLRUN_CONFIG")),
        attempt=_number_variable(env, "RLRUN_ATTEMPT"),
        api_key=_required_variable(env, KEY_VARIABLE),
        pod_name=_required_variable(env, "RLRUN_POD_NAME"),
        config_mark=env.get(VARIABLE) or None,
        pod_ip=env.get("RLRUN_POD_IP") or None,
        nodes=_number_variable(env, "RLRUN_NNODES", PodSettings.nodes),
        master_addr=env.get("RLRUN_MASTER_ADDR") or PodSettings.master_addr,
        master_port=_number_variable(env, "RLRUN_MASTER_PORT", PodSettings.master_port),
        state=Path(env.get("RLRUN_POD_STATE") or PodSettings.state),
        termination_log=Path(env.get("RLRUN_TERMINATION_LOG") or PodSettings.termination_log),
    )


def _required_variable(env: Mapping[str, str], name: str) -> str:
    value = env.get(name)
    if not value:
        raise RoleError(f"{name} is not set; the operator sets it in every container of a run", exit_codes.USAGE)
    return value


def _number_variable(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise RoleError(f"{name} is {text!r}, expected a whole number from 1", exit_codes.USAGE)
    return int(text)


HANDLED = (signal.SIGTERM, signal.SIGINT)
SIGNALLED = 128
"""Exit code 128 + n means: ended by signal n."""


class StoppedError(Exception):
    """A signal arrived while this process was waiting."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """Exit code: 128 + number of the signal."""
        return SIGNALLED + self.number


class Signals:
    """Signal handlers of this process; must be created in the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        """First received signal."""
        self._ending = Ending()
        self._child: int | None = None
        for number in HANDLED:
            signal.signal(number, self._handle_signal)
        # The container's command has blocked these signals so far: a pending one is delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        self._ending.set()
        if self._child is not None:
            self._send_signal(number)

    def _send_signal(self, number: int) -> None:
        # `_child` is set: both callers check it. Pid 0 would mean the whole process group.
        with suppress(ProcessLookupError):
            os.kill(self._child or 0, number)

    def forward_to(self, child: int | None) -> None:
        """Forward every signal to the process `child`, including one that has already arrived; None: stop forwarding."""
        self._child = child
        if child is not None and self.received is not None:
            self._send_signal(self.received)

    def fileno(self) -> int:
        """Descriptor for `select`, readable from the first signal on; its bytes are never consumed."""
        return self._ending.fileno()

    def sleep(self, seconds: float | None) -> None:
        """Wait for a time, or until a signal arrives.

        Args:
            seconds: duration; None: until a signal arrives.

        Raises:
            StoppedError: a signal arrived, now or before.
        """
        self._ending.wait(seconds)
        if self.received is not None:
            raise StoppedError(self.received)
