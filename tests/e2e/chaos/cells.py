"""The chaos matrix: broken part, kind of fault, and expected result."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.e2e.chaos.faults import CONTROL_PLANE, Faults
from tests.e2e.chaos.read_only import read_only
from tests.e2e.chaos.small_volume import empty, fill
from tests.support.faults.rlrun_faults import FOLDER_VARIABLE, POINTS, VARIABLE

MARKERS = "faults"
"""Folder in the run's folder with the records of fault points."""
Break = Callable[[Faults], AbstractContextManager[float]]
"""Function that breaks something, yields the time of the fault, and repairs at its end what does not recover without
help. The block ends when the fault has been noticed, or after `Cell.lasts` seconds."""
Says = Callable[[Mapping[str, Any]], bool]
HANGS = {"progress": {"deadlineSeconds": 30, "startupDeadlineSeconds": 180}}


@dataclass(frozen=True)
class Cell:
    """One fault in one role."""

    role: str
    fault: str
    act: Break | None
    """Fault, or None if the run's own environment has it, see `points`."""
    ends: Literal["next attempt", "same attempt", "either", "Failed"] = "next attempt"
    """Expected ends; several are correct if the moment decides."""
    counted: int | None = None
    """Restarts that count against `maxRestarts`, or None if any number is correct."""
    lost: int | None = None
    """Largest number of lost steps, or None for those since the newest complete checkpoint."""
    points: Mapping[str, str] = field(default_factory=dict)
    """FAULT_POINTS of each role."""
    restarts: int = 1
    """Largest number of restarts."""
    lasts: float = 0.0
    """Duration in seconds."""
    steps: int = 40
    alone: bool = False
    """Whether it breaks more than its own run."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    says: Says | None = None
    """Whether a status must report the fault. None: the record of a failure must, if there is one."""
    blames: str = ""
    """Role and reason that the record of the failure must have; empty: any."""
    mended: bool = False
    """Whether recovery is impossible before the fault is over, so that recovery time counts from its end."""
    small_volume: bool = False
    patient: bool = False
    """Tolerations that keep pods on unready nodes for 5 minutes, Kubernetes' default; the test cluster uses seconds."""

    @property
    def name(self) -> str:
        """Name of the run: short, in lower case."""
        words = f"{self.role}-{self.fault}".lower()
        return "".join(c if c.isalnum() else "-" for c in words).strip("-")[:38].strip("-")


def at(act: Callable[[Faults], float]) -> Break:
    """Return a fault without a duration."""
    return lambda faults: nullcontext(act(faults))


def _signal(who: str, number: int) -> Break:
    return at(lambda faults: faults.signal(who, number))


def _roles() -> Iterator[Cell]:
    for who in ("trainer-0", "trainer-1", "orchestrator", "inference"):
        ends: Literal["next attempt", "same attempt"] = "same attempt" if who == "inference" else "next attempt"
        fails = None if who == "inference" else 1
        yield Cell(who, "SIGKILL", _signal(who, signal.SIGKILL), ends, fails)
        saved = 0 if who.startswith("trainer") else None
        yield Cell(who, "SIGTERM", _signal(who, signal.SIGTERM), ends, fails, saved)
        yield Cell(who, "OOM", at(lambda faults, who=who: faults.starve(who)), ends, fails)  # type: ignore[misc]
        yield Cell(who, "pod deleted", at(lambda faults, who=who: faults.delete_pod(who)), ends, 0, saved)  # type: ignore[misc]
        yield Cell(
            who,
            "pod deleted by force",
            at(lambda faults, who=who: faults.delete_pod(who, force=True)),  # type: ignore[misc]
            ends,
            0,
        )
    hang = "step.trained=hang@10"  # a signal to one thread: the process still answers
    yield Cell("trainer", "hangs in a step", None, counted=1, points={"trainer": hang}, spec=HANGS)
    frozen: dict[str, Any] = {"counted": 1, "spec": HANGS, "blames": "orchestrator NoProgress"}
    yield Cell("orchestrator", "hangs", None, points={"orchestrator": "batch.told=hang@10"}, **frozen)
    own = "trainer ExitCode"
    yield Cell("trainer", "exit code 3", None, counted=1, points={"trainer": "step.trained=exit:3@10"}, blames=own)
    yield Cell("trainer", "exit code 65", None, "Failed", points={"trainer": "step.trained=exit:65@10"})
    yield Cell("orchestrator", "exit code 3", None, counted=1, points={"orchestrator": "batch.told=exit:3@12"})
    yield Cell("inference", "exit code 3", None, "same attempt", points={"inference": "engine.resumed=exit:3@9"})
    yield Cell("inference", "SIGSTOP", _signal("inference", signal.SIGSTOP), "same attempt")
    for who in ("trainer-0", "trainer-1"):
        yield Cell(who, "SIGSTOP", _signal(who, signal.SIGSTOP), counted=1, spec=HANGS)
    # Without an expired deadline, its liveness probe would end it after 3 minutes.
    yield Cell("orchestrator", "SIGSTOP", _signal("orchestrator", signal.SIGSTOP), **frozen)


def _points() -> Iterator[Cell]:
    """Return one cell for each point of the file protocol and of the hand-over; the process dies when it reaches the
    point for the third time."""
    for point in POINTS:
        if point.startswith(("export.", "journal.before_remove", "attempt.", "turn.")):
            continue  # the comment below explains attempts; other points need longer runs, or engines in the trainer's pods
        role = (
            "inference"
            if point.startswith("engine.")
            else "orchestrator"
            if point.startswith(("batch.", "metrics.", "checkpoint.orchestrator", "journal.", "handover.", "lease."))
            else "trainer"
        )
        ends: Literal["next attempt", "same attempt"] = "same attempt" if role == "inference" else "next attempt"
        rare = point.startswith(("checkpoint.", "retention."))
        plan = f"{point}=sigkill@{2 if rare else 8}"
        yield Cell("at", point, None, ends, points={role: plan}, counted=None if role == "inference" else 1)
    for point in ("attempt.before_write", "attempt.before_link", "attempt.written"):
        yield Cell("at", point, None, counted=1, points={"trainer": f"{point}=sigkill@1"})


@contextmanager
def _kubelet(faults: Faults) -> Iterator[float]:
    with faults.without(faults.node_of("trainer-1"), "kubelet") as now:
        yield now


@contextmanager
def _power(faults: Faults) -> Iterator[float]:
    node = faults.node_of("trainer-1")
    with faults.during(lambda: faults.cluster.power_off(node), lambda: faults.cluster.power_on(node)) as now:
        yield now


@contextmanager
def _frozen(faults: Faults) -> Iterator[float]:
    node = faults.node_of("trainer-1")
    with faults.during(lambda: faults.cluster.freeze(node), lambda: faults.cluster.thaw(node)) as now:
        yield now


@contextmanager
def _unplugged(faults: Faults) -> Iterator[float]:
    node = faults.node_of("trainer-1")
    with faults.during(lambda: faults.cluster.unplug(node), lambda: faults.cluster.plug(node)) as now:
        yield now


@contextmanager
def _parted(faults: Faults) -> Iterator[float]:
    """Cut the network between the nodes; both still reach the API server."""
    nodes = faults.cluster.nodes

    def each(act: Callable[[str], None]) -> None:
        for node in nodes:
            act(node)

    with faults.during(lambda: each(faults.cluster.isolate), lambda: each(faults.cluster.join)) as now:
        yield now


@contextmanager
def _no_api_server(faults: Faults) -> Iterator[float]:
    server = faults.cluster.api_server
    with faults.during(server.stop, server.start) as now:
        yield now


@contextmanager
def _no_etcd(faults: Faults) -> Iterator[float]:
    with faults.without(CONTROL_PLANE, "etcd") as now:
        yield now


@contextmanager
def _forced(faults: Faults) -> Iterator[float]:
    """Kill a node's kubelet while its containers live on, and delete its pods by force."""
    node = faults.node_of("trainer-1")
    with faults.without(node, "kubelet") as now:
        for pod in faults.run.pods():
            if pod["spec"].get("nodeName") == node:
                name = str(pod["metadata"]["name"])
                faults.run.kubectl("delete", "pod", name, "--wait=false", "--grace-period=0", "--force")
        yield now


@contextmanager
def _full(faults: Faults) -> Iterator[float]:
    folder = faults.run.own_volume
    assert folder is not None
    with faults.during(lambda: fill(folder), lambda: empty(folder)) as now:
        yield now


@contextmanager
def _read_only(faults: Faults) -> Iterator[float]:
    with read_only(faults.cluster, faults.run) as now:
        yield now


@contextmanager
def _suspended(faults: Faults) -> Iterator[float]:
    with faults.during(lambda: faults.edit(suspend=True), lambda: faults.edit(suspend=False)) as now:
        yield now


def _storage_is_full(status: Mapping[str, Any]) -> bool:
    return _storage(status) == "StorageFull"


def _storage_is_read_only(status: Mapping[str, Any]) -> bool:
    return _storage(status) == "StorageReadOnly"


def _storage(status: Mapping[str, Any]) -> str:
    return next((str(c["reason"]) for c in status.get("conditions", ()) if c["type"] == "StorageReady"), "")


def _is_suspended(status: Mapping[str, Any]) -> bool:
    return bool(status["phase"] == "Suspended")


def _is_again(status: Mapping[str, Any]) -> bool:
    return bool(status["attempt"] > 1)


def _node_is_lost(status: Mapping[str, Any]) -> bool:
    return bool((status.get("lastFailure") or {}).get("reason") == "NodeLost")


def _run() -> Iterator[Cell]:
    """Return cells with faults of a whole run that affect no other run."""
    yield Cell(
        "volume",
        "full for 30 s",
        _full,
        "same attempt",
        0,
        lasts=30,
        says=_storage_is_full,
        mended=True,
        small_volume=True,
        steps=60,
    )
    yield Cell(
        "volume",
        "read-only for 30 s",
        _read_only,
        "same attempt",
        0,
        lasts=30,
        says=_storage_is_read_only,
        mended=True,
        steps=60,
    )
    yield Cell("run", "suspended and resumed", _suspended, counted=0, lost=0, says=_is_suspended, mended=True)
    yield Cell("run", "restarted by hand", at(lambda faults: faults.restart()), counted=0, lost=0, says=_is_again)


def _operator_thrice(faults: Faults) -> float:
    """Kill the operator repeatedly while it starts another attempt."""
    now = faults.signal("trainer-0", signal.SIGKILL)
    for _ in range(3):
        time.sleep(random.uniform(0.2, 2.5))  # varies the moment
        try:
            faults.signal("operator", signal.SIGKILL)
        except (AssertionError, StopIteration):
            continue  # the operator has not returned yet
    return now


def _cluster() -> Iterator[Cell]:
    yield Cell("operator", "SIGKILL", _signal("operator", signal.SIGKILL), "same attempt", 0, alone=True)
    yield Cell(
        "operator", "SIGKILL up to 3 times while it restarts the run", at(_operator_thrice), counted=1, alone=True
    )
    # The processes continue to train until the control plane marks the node as lost.
    yield Cell("node", "kubelet killed", _kubelet, counted=0, alone=True, steps=150)
    # The next pods may be scheduled on the same node until it is marked as lost.
    yield Cell("node", "kubelet killed, pods deleted by force", _forced, counted=0, alone=True, lasts=45, restarts=2)
    # The other trainer fails at once, which counts until the node is known to be lost, so the node stays off until
    # then.
    away = {"nodeLoss": {"forceDeleteSeconds": 10}}
    yield Cell("node", "power-off", _power, counted=0, alone=True, says=_node_is_lost, spec=away)
    yield Cell("node", "frozen for 30 s", _frozen, "either", lasts=30, alone=True, steps=100)
    yield Cell("node", "cable pulled for 30 s", _unplugged, "either", lasts=30, alone=True, steps=100)
    yield Cell("nodes", "cut from each other for 30 s", _parted, "either", lasts=30, alone=True, steps=100)
    yield Cell("etcd", "away for 5 s", _no_etcd, "same attempt", 0, lasts=5, alone=True, steps=40)
    yield Cell(
        "API server",
        "away for 2 minutes",
        _no_api_server,
        "same attempt",
        0,
        lasts=120,
        alone=True,
        steps=400,
        patient=True,
    )


CELLS: tuple[Cell, ...] = (*_roles(), *_points(), *_run(), *_cluster())


def environment(cell: Cell, role: str, run: str) -> list[dict[str, str]]:
    """Return the variables that a cell needs in a role of the run."""
    if role not in cell.points:
        return []
    return [
        {"name": VARIABLE, "value": cell.points[role]},
        {"name": FOLDER_VARIABLE, "value": f"/data/{run}/{MARKERS}"},
    ]
