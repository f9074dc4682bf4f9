"""Record of a run on one machine, in its folder: what a cluster has in the progress Lease, and who runs it.

`rlrun local` is the one writer. The record is for people: it is replaced in one step, but not flushed to the disk, and a volume that
refuses it stops no run. It holds no secret.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rlrun.protocol.files.paths import TMP_SUFFIX

State = Literal["Running", "Complete", "Interrupted", "Failed"]
BEAT_SECONDS = 2.0
"""Time between two records of a run that goes on."""
LAUNCH_MANIFEST, LAUNCH_LOG = "launch.yaml", "launch.log"
"""Files in a run's folder that a start in the background writes before the launcher: its manifest, and what the launcher prints."""
LOST_SECONDS = 30.0
"""A record that says Running and is older than this was left by a launcher that is gone, wherever that ran."""


@dataclass(frozen=True)
class LauncherRecord:
    """State of a run on one machine at one moment. Unknown fields of newer releases are dropped when it is read."""

    name: str
    """The run's name."""
    attempt: int
    command: str
    """Command that goes on with the run."""
    pid: int
    host: str
    started_ticks: int | None
    """Start of the process, in ticks since the boot: a pid is given again, both together are not. None: not known."""
    state: State = "Running"
    began: float = 0.0
    """Start of the attempt, in seconds since the epoch."""
    time: float = 0.0
    """When this was written, in seconds since the epoch."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """The orchestrator's progress (`rlrun.orchestrator.progress.server.Progress`), as it last answered; empty: it never has."""
    progress_time: float = 0.0
    """When it last answered, in seconds since the epoch."""
    failed_role: str | None = None
    """Name of the process that ended the attempt, such as `trainer` or `inference-1`."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of each role; those that both use are the trainer's. Empty: none, or not known."""
    gpu_use: Mapping[str, Any] = field(default_factory=dict)
    """Use of each role's GPUs (`gpu_use.GpuUse`), as NVML showed it last; empty: there is no NVML, or no GPU."""
    exit_code: int | None = None
    """Exit code of that process, as `subprocess` has it: -n is signal n."""

    def alive(self, now: float) -> bool:
        """True if the launcher that wrote this still runs the attempt."""
        if self.state != "Running":
            return False
        if self.host == socket.gethostname():
            return started_ticks(self.pid) is not None and started_ticks(self.pid) == self.started_ticks
        return now - self.time < LOST_SECONDS


def started_ticks(pid: int) -> int | None:
    """Start of a process in ticks since the boot; None: there is none, or it is a zombie. Linux only (/proc)."""
    try:
        after_name = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if after_name[0] == "Z" else int(after_name[19])
    except (OSError, ValueError, IndexError):
        return None


def new_record(name: str, attempt: int, command: str, gpus: Mapping[str, int] | None = None) -> LauncherRecord:
    """Record of an attempt that this process begins now."""
    now, pid = time.time(), os.getpid()
    host, ticks = socket.gethostname(), started_ticks(pid)
    return LauncherRecord(name, attempt, command, pid, host, ticks, began=now, time=now, gpus=gpus or {})


def write_record(path: Path, record: LauncherRecord) -> bool:
    """Replace the record; False if the volume refuses it."""
    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        temporary.write_text(json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
    except OSError:
        return False
    return True


def read_record(path: Path) -> LauncherRecord | None:
    """The record in a run's folder; None: there is none, or something else has damaged it."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    known = {one.name for one in fields(LauncherRecord)}
    try:
        record = LauncherRecord(**{key: value for key, value in document.items() if key in known})
    except TypeError:
        return None
    whole = isinstance(record.pid, int) and isinstance(record.attempt, int)
    whole = whole and all(isinstance(one, dict) for one in (record.progress, record.gpus, record.gpu_use))
    counts = isinstance(record.gpus, dict) and all(type(count) is int for count in record.gpus.values())
    numbers = all(isinstance(value, int | float) for value in (record.time, record.began, record.progress_time))
    return record if whole and numbers and counts and record.state in get_args(State) else None
