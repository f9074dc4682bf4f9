"""In-memory run with its Workload and Kueue; the operator may be killed after each write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.providers.kueue import next_step
from rlrun_operator.providers.queue_answers import Create, Edit, Flavor, PutStatus, QueuedRun, Step
from rlrun_operator.reconcile.external_queue import make_queued_run
from rlrun_operator.reconcile.kueue_queue import sets_of
from tests.sim.cluster.api import merged
from tests.support.kueue import StandIn, judge, may_have_pods
from tests.unit.operator.decide.kube import Kube

Json = dict[str, Any]
SPEC: Json = {
    "trainer": {"replicas": 2, "gpusPerReplica": 8},
    "inference": {"replicas": 2, "gpusPerReplica": 1},
}
FLAVORS = {
    "h100": Flavor({"cloud/gpu": "h100"}, ({"key": "gpu", "operator": "Exists"},)),
    "a100": Flavor({"cloud/gpu": "a100"}),
}


class KilledError(Exception):
    """The operator was killed between two writes."""


class Life:
    """One run in one queue.

    Args:
        kills: function that returns whether the operator is killed instead of write number n, counted from 1.
    """

    def __init__(
        self, *, kills: Callable[[int], bool] = lambda number: False, queue: str = "team-a", **spec: Any
    ) -> None:
        self.kube = Kube(SPEC | spec)
        self.kueue = StandIn()
        self.queue = queue
        self.workload: Json | None = None
        self.rivals: list[Json] = []
        """Workloads of other owners."""
        self.kills = kills
        self.killed = 0
        self.writes = 0
        self.made = 0
        """Number of created Workloads."""
        self.versions = 100

    # ---- operator

    def subject(self) -> QueuedRun:
        """Run as Kueue's edge reads it."""
        case = RunSnapshot(self.kube.look(), self.kube.now, self.kube.settings, "", 0.0)
        sets = sets_of(case, case.spec) if case.spec is not None else ()
        return make_queued_run(case, self.queue, sets)

    def step(self) -> Step:
        """Return the next step without executing it."""
        return next_step(self.subject(), self.workload, flavors=FLAVORS, now=self.kube.now)

    def pass_(self) -> bool:
        """Execute one pass of the operator; returns whether it wrote anything."""
        before = self.writes
        while (made := self.step()).write is not None:
            self._count()
            self._do(made.write)
            self.check()
        self.kube.admission = made.answer
        decision = self.kube.decide()
        for request in self.kube._requests(decision):
            known = len(self.kube.writes)
            self._count()
            request()
            if len(self.kube.writes) == known:
                self.writes -= 1  # nothing changed
            self.check()
        return self.writes > before

    def _count(self) -> None:
        self.writes += 1
        if self.kills(self.writes):
            self.killed += 1
            raise KilledError

    def _do(self, write: object) -> None:
        if isinstance(write, Create):
            assert self.workload is None
            self._store(None, copy.deepcopy(dict(write.manifest)))
            self.made += 1
        elif isinstance(write, PutStatus):
            assert self.workload is not None
            self._store(self.workload, {**copy.deepcopy(self.workload), "status": copy.deepcopy(dict(write.status))})
        elif isinstance(write, Edit):
            assert self.workload is not None
            self._store(self.workload, merged(copy.deepcopy(self.workload), dict(write.patch)))
        else:
            self.workload = None

    def _store(self, old: Json | None, new: Json) -> None:
        judge(old, new)
        self.versions += 1
        new["metadata"] |= {"resourceVersion": str(self.versions)}
        self.workload = new

    # ---- all controllers

    def settle(self) -> None:
        """Run all controllers and the operator until nothing changes."""
        for _ in range(60):
            try:
                acted = self.pass_()
            except KilledError:
                self.kube.new_operator()
                acted = True
            moved = self.kube.controllers()
            judged = self._kueue()
            self.check()
            if not (acted or moved or judged):
                return
        raise AssertionError(f"no rest: {self.kube.status}")

    def tick(self, seconds: float = 10.0) -> None:
        """Pass time and settle twice, because the detection of deleted objects takes some seconds."""
        for _ in range(3):
            self.kube.now += seconds
            self.settle()

    def _kueue(self) -> bool:
        mine = [self.workload] if self.workload is not None else []
        changed = self.kueue.act([*mine, *self.rivals])
        for one in changed:
            if self.workload is not None and one["metadata"]["name"] == self.workload["metadata"]["name"]:
                self._store(None, one)
        return bool(changed)

    def kueue_does(self, change: Any) -> None:
        """Change the run's Workload as Kueue does."""
        assert self.workload is not None
        self._store(None, change(self.workload))

    def check(self) -> None:
        """Fail if a pod exists without quota."""
        if self.kube.pods("trainer") or self.kube.pods("inference") or self.kube.pods("orchestrator"):
            over = self.kube.status.get("phase") in ("Complete", "Failed")
            assert may_have_pods(self.workload) or over, (self.kube.status, self.workload)

    def running(self, step: int = 7) -> Life:
        """Run that is admitted, trains and has saved step 5."""
        self.settle()
        self.kube.report(step, checkpoint_step=5)
        self.tick()
        assert self.phase == "Running", self.kube.status
        return self

    @property
    def phase(self) -> str:
        return str(self.kube.status.get("phase"))

    @property
    def said(self) -> str:
        return f"{self.kube.status.get('reason')}: {self.kube.status.get('message')}"

    def workload_says(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition of the Workload."""
        assert self.workload is not None
        found = next((c for c in self.workload.get("status", {}).get("conditions", ()) if c["type"] == kind), {})
        return found.get("status", ""), found.get("reason", "")
