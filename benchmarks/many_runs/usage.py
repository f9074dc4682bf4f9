"""Who used what of a native control plane: CPU and memory by process, writes by user."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.native import cgroups
from tests.cluster.native.cluster import NativeCluster
from tests.cluster.native.plan import CONTROL_PLANE

SERVER, CONTROLLERS = "kube-apiserver", "kube-controller-manager"
DAEMONS = ("etcd", SERVER, CONTROLLERS, "kube-scheduler", "kwok")
OPERATOR = "operator"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

Cpu = Mapping[str, float]
"""Process -> seconds of CPU."""


def processes(cluster: Cluster) -> dict[str, int]:
    """The control plane's daemons and their process ids on this machine."""
    assert isinstance(cluster, NativeCluster), "the control plane of other clusters does not run on this machine"
    found: dict[str, int] = {}
    for pid in cgroups.processes(f"{cluster.plan.cgroup}/{CONTROL_PLANE}"):
        name = Path(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()).name
        if name in DAEMONS:
            found[name] = pid
    return found


def cpu(pids: Mapping[str, int]) -> dict[str, float]:
    """Seconds of CPU that each process has used since it began."""
    return {name: _cpu(Path(f"/proc/{pid}/stat").read_text()) for name, pid in pids.items()}


def _cpu(stat: str) -> float:
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory(pids: Mapping[str, int]) -> dict[str, float]:
    """Resident memory of each process in MB (10⁶ bytes)."""
    return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6 for name, pid in pids.items()}


def spent(before: Cpu, after: Cpu) -> dict[str, float]:
    """CPU between two readings."""
    return {name: used - before.get(name, 0.0) for name, used in after.items()}


@dataclass(frozen=True)
class Write:
    """A kind of write request, as the audit log has it."""

    who: str
    """A controller's account, or what a program calls itself."""
    verb: str
    resource: str
    """With the subresource."""


def writes(cluster: Cluster, began: float, ended: float) -> Counter[Write]:
    """Writes that the API server answered between two times (seconds since the epoch), dry-runs and refused ones included."""
    log = cluster.audit_log
    return counted(_lines(sorted(log.parent.glob("audit*.log"))), began, ended)


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        with file.open() as lines:
            yield from lines


def counted(lines: Iterable[str], began: float, ended: float) -> Counter[Write]:
    """The same of an audit log's lines; one that is being written is left out."""
    first, last = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") for at in (began, ended))
    found: Counter[Write] = Counter()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if first <= record["requestReceivedTimestamp"] <= last:
            subject = record.get("objectRef") or {}
            resource = "/".join(filter(None, (subject.get("resource", "?"), subject.get("subresource"))))
            found[Write(_who(record), record["verb"], resource)] += 1
    return found


def _who(record: Mapping[str, object]) -> str:
    user = record["user"]
    name = str(user["username"] if isinstance(user, Mapping) else user)
    agent = str(record.get("userAgent", "")).partition("/")[0]
    return name.rpartition(":")[2] if name.startswith("system:") else agent or name
