"""Player for one cell of the matrix: a training run, the fault, and its consequences."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tests.cluster.native.cluster import NativeCluster
from tests.e2e.chaos.cells import MARKERS, Cell, environment
from tests.e2e.chaos.chaos_run import ChaosRun
from tests.e2e.chaos.faults import Faults
from tests.e2e.chaos.history import History, Trained
from tests.e2e.chaos.small_volume import small_volume
from tests.e2e.cluster.kube_run import example

INTERVAL = 4
STEP_SECONDS = 0.4
PATIENCE = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for taint in ("not-ready", "unreachable")
]


@dataclass(frozen=True)
class Outcome:
    """One row of the table; seconds count from the fault."""

    cell: Cell
    happened: str
    detected: float | None
    """Time until the status reported the fault."""
    recovered: float | None
    """Time until the first step trained afterwards; counted from the repair, if a person had to repair something."""
    lost: int
    """Number of steps that were trained again."""


def manifest(cell: Cell, image: str) -> dict[str, Any]:
    """Return the manifest of a quickstart with stubs: two trainer pods, and a second engine if the fault breaks the
    first."""
    document = example(
        "quickstart",
        maxSteps=cell.steps,
        checkpoint={"interval": INTERVAL, "keepLast": 2},
        trainer={"replicas": 2, "processesPerReplica": 1},
        inference={"replicas": 2 if cell.role == "inference" else 1},
        **cell.spec,
    )
    document["metadata"]["name"] = cell.name
    if cell.small_volume:
        document["spec"]["storage"] = {"claimName": f"{cell.name}-data"}
    document["spec"].pop("evaluation", None)
    document["spec"]["orchestrator"] |= {"batchSize": 32}
    script = json.dumps({"trainer": {"stepSeconds": STEP_SECONDS}})
    for role in ("trainer", "inference", "orchestrator"):
        document["spec"].setdefault(role, {})["image"] = image
        env = document["spec"][role].setdefault("env", [])
        env += [{"name": "STUB_SCRIPT", "value": script}, *environment(cell, role, cell.name)]
        if cell.patient:
            document["spec"][role]["podTemplate"] = {"spec": {"tolerations": PATIENCE}}
    return document


def play(cluster: NativeCluster, namespace: str, cell: Cell, image: str) -> Outcome:
    """Run a cell to its end.

    Raises:
        AssertionError: a step was lost, trained twice or counted wrongly, or the run stopped; the message has the state
            of the run.
    """
    run = ChaosRun(cluster, manifest(cell, image), namespace)
    children = (f"rlr/{run.name}", f"pvc/{run.name}-data")  # the run would continue from a leftover volume
    run.kubectl("delete", *children, "--ignore-not-found", timeout=120)
    volume = small_volume(cluster, namespace, f"{run.name}-data") if cell.small_volume else nullcontext()
    with volume as run.own_volume:
        return _live(cell, run, children)


def _live(cell: Cell, run: ChaosRun, children: Sequence[str]) -> Outcome:
    run.apply()
    try:
        if cell.act is None and "attempt" in cell.fault:
            run.wait("its volume", run.volume)
        else:
            run.wait_phase("Running")
        with History(run) as history:
            return _break(cell, run, history)
    finally:
        run.kubectl("delete", *children, "--ignore-not-found", "--wait=false", check=False)


def _break(cell: Cell, run: ChaosRun, history: History) -> Outcome:
    if cell.act is None:
        return _by_itself(cell, run, history)
    run.wait("two checkpoints and a step", lambda: _step(history.lines()) > 2 * INTERVAL, steps=True)
    if (
        cell.role == "inference"
    ):  # other cells do not wait for a status, because a parallel cell may have killed their operator
        run.wait("both engines are ready", lambda: (run.status().get("inference") or {}).get("ready") == 2)
    attempt = run.attempt()
    with cell.act(Faults(run)) as at:
        # State at the time of the fault: later work is not lost by it.
        complete = history.newest_checkpoint(attempt)
        began = time.monotonic()
        waits = cell.says is not None or not (cell.lasts or cell.ends == "same attempt")
        run.wait(
            "the fault is noticed, or over",
            lambda: (
                time.monotonic() - began >= cell.lasts
                and (not waits or _noticed(cell, history, attempt, at) is not None)
            ),
            steps=True,
        )
    return _judge(cell, run, history, attempt, at, complete, mended=time.time())


def _by_itself(cell: Cell, run: ChaosRun, history: History) -> Outcome:
    """Return the time of the marker: the fault is part of the run's own environment."""
    markers = history.folder / MARKERS
    run.wait("the fault point", lambda: any(markers.glob("*")), steps=True)
    at = next(markers.glob("*")).stat().st_mtime
    before = [attempt for (_, attempt), line in history.seen.items() if line.time <= at]
    attempt = max(before, default=1)
    return _judge(cell, run, history, attempt, at, history.newest_checkpoint(attempt))


def _noticed(cell: Cell, history: History, attempt: int, at: float) -> float | None:
    return history.first_status_time(cell.says, at) if cell.says is not None else history.failure_seen(attempt, at)


def _step(lines: Iterable[Trained]) -> int:
    return max((line.step for line in lines), default=0)


def _judge(
    cell: Cell, run: ChaosRun, history: History, attempt: int, at: float, complete: int, mended: float | None = None
) -> Outcome:
    if cell.ends == "Failed":
        final = run.wait_phase("Failed")
        return Outcome(
            cell, str(final["lastFailure"]["reason"]), _since(history.failure_seen(attempt, at), at), None, 0
        )
    final = run.wait_phase("Complete")
    lines = history.lines()
    told = f"{run.name}: {[(line.step, line.attempt) for line in lines]}"
    assert [line.step for line in lines] == list(range(1, cell.steps + 1)), f"each step once, in order; {told}"
    assert [line.attempt for line in lines] == sorted(line.attempt for line in lines), told
    restarted = final["attempt"] > attempt
    if cell.ends != "either":
        assert restarted == (cell.ends == "next attempt"), f"{run.describe_status()}; {final.get('failures')}"
    assert final["attempt"] <= attempt + cell.restarts, f"one fault, one restart; {final.get('failures')}"
    if cell.counted is not None:
        assert final["restartsCountedTowardsMax"] == cell.counted, final.get("failures")
    happened, lost = "went on", 0
    if restarted:
        resumed = int(final["checkpoint"]["resumedFromStep"])
        before = _step(line for line in history.seen.values() if line.attempt == attempt)
        lost = max(before - resumed, 0)
        assert resumed >= complete, f"the checkpoint of step {complete} was complete; {told}"
        assert cell.lost is None or lost <= cell.lost, f"{lost} steps lost; {told}"
        happened = f"attempt {final['attempt']}"
        if cell.act is None or cell.role != "run":
            failure = final["failures"][-1]
            blamed = f"{failure['role']} {failure['reason']}"
            assert cell.blames in ("", blamed), f"{cell.blames} is to blame; {failure}"
            happened += f": {blamed}"
    wanted = final["attempt"]
    from_ = mended if cell.mended and mended is not None else at
    next_step = min((line.time for line in lines if line.attempt == wanted and line.time > from_), default=None)
    detected = _noticed(cell, history, attempt, at) if restarted or cell.says is not None else None
    return Outcome(cell, happened, _since(detected, at), _since(next_step, from_), lost)


def _since(moment: float | None, at: float) -> float | None:
    return None if moment is None else round(moment - at, 1)
