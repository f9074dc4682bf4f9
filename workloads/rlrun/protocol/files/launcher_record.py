"""Record of a run on one machine, in its folder: the content of a cluster's progress Lease, the launcher process, and GPU use.

Metrics of pods report the GPU use of a role in the same form (`GpuUse`).

Only `rlrun local` writes the record. It is informational: it is replaced atomically but not flushed to disk, and a volume that refuses it
does not stop the run. It contains no secret.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rlrun.protocol.files.paths import TMP_SUFFIX


@dataclass(frozen=True)
class GpuUse:
    """GPU use of one role at one time."""

    gpus: int
    """Number of measured GPUs."""
    utilization: float | None
    """Share of the last sample in which a kernel ran, mean over the GPUs; None: not reported, for example by MIG slices."""
    used_bytes: int
    """Used memory of all of them."""
    size_bytes: int
    """Memory size of all of them."""
    idle: float | None = None
    """Share of the attempt's time in which they computed almost nothing; None: not reported."""
    of: int = 0
    """Number of the role's GPUs, if not all were measured."""


def read_use(found: object) -> GpuUse | None:
    """Return the use in an untrusted document, or None if it has none."""
    if not isinstance(found, Mapping):
        return None
    gpus, used, size = (_read_count(found.get(name)) for name in ("gpus", "used_bytes", "size_bytes"))
    if not gpus or used is None or size is None:
        return None
    return GpuUse(gpus, _read_share(found.get("utilization")), used, size, _read_share(found.get("idle")))


def mean_share(shares: Sequence[float]) -> float | None:
    """Return the mean of shares, or None if there are none."""
    return sum(shares) / len(shares) if shares else None


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _read_share(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return min(1.0, max(0.0, float(value))) if good and isinstance(value, int | float) else None


State = Literal["Running", "Complete", "Interrupted", "Failed"]
BEAT_SECONDS = 2.0
"""Seconds between two records of an active run."""
LAUNCH_MANIFEST, LAUNCH_LOG = "launch.yaml", "launch.log"
"""Files in a run's folder that a background start writes before the launcher: its manifest, and the launcher's output."""
LOST_SECONDS = 30.0
"""Age after which a record with state Running belongs to a dead launcher, on any machine."""


@dataclass(frozen=True)
class LauncherRecord:
    """State of a run on one machine at one time. Unknown fields of newer releases are dropped when it is read."""

    name: str
    """Name of the run."""
    attempt: int
    command: str
    """Command that continues the run."""
    pid: int
    host: str
    started_ticks: int | None
    """Start of the process in ticks since the boot, which makes a reused pid recognizable. None: unknown."""
    state: State = "Running"
    began: float = 0.0
    """Start of the attempt, in seconds since the epoch."""
    time: float = 0.0
    """Time of this record, in seconds since the epoch."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Last answer of the orchestrator's progress server (`rlrun.orchestrator.progress.progress_server.Progress`); empty: no answer yet."""
    progress_time: float = 0.0
    """Time of that answer, in seconds since the epoch."""
    failed_role: str | None = None
    """Name of the process that ended the attempt, such as `trainer` or `inference-1`."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of each role; GPUs that both use count for the trainer. Empty: none, or unknown."""
    gpu_use: Mapping[str, Any] = field(default_factory=dict)
    """Last GPU use of each role (`gpu_use.GpuUse`) from NVML; empty: no NVML, or no GPU."""
    exit_code: int | None = None
    """Exit code of that process, in the form of `subprocess`: -n is signal n."""

    def alive(self, now: float) -> bool:
        """Return whether the launcher of this record still runs the attempt."""
        if self.state != "Running":
            return False
        if self.host == socket.gethostname():
            return started_ticks(self.pid) is not None and started_ticks(self.pid) == self.started_ticks
        return now - self.time < LOST_SECONDS


def started_ticks(pid: int) -> int | None:
    """Return the start of a process in ticks since the boot, or None if it does not exist or is a zombie. Linux only (/proc)."""
    try:
        after_name = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if after_name[0] == "Z" else int(after_name[19])
    except (OSError, ValueError, IndexError):
        return None


def new_record(name: str, attempt: int, command: str, gpus: Mapping[str, int] | None = None) -> LauncherRecord:
    """Return the record of an attempt that this process starts now."""
    now, pid = time.time(), os.getpid()
    host, ticks = socket.gethostname(), started_ticks(pid)
    return LauncherRecord(name, attempt, command, pid, host, ticks, began=now, time=now, gpus=gpus or {})


def write_record(path: Path, record: LauncherRecord) -> bool:
    """Replace the record. Returns False if the volume refuses it."""
    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        temporary.write_text(json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
    except OSError:
        return False
    return True


def read_record(path: Path) -> LauncherRecord | None:
    """Return the record in a run's folder, or None if it is missing or damaged."""
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
