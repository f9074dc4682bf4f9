"""In-memory run with its PodGroup and Volcano; the operator may be killed after each write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.providers import volcano
from rlrun_operator.providers.queue_answers import Create, Edit, QueuedRun, Step
from rlrun_operator.reconcile.external_queue import make_queued_run
from rlrun_operator.reconcile.volcano_queue import required_pods
from tests.sim.cluster.api import merged
from tests.support.volcano import GROUP, OVERUSED, StandIn
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.providers.life import KilledError

Json = dict[str, Any]
SPEC: Json = {
    "trainer": {"replicas": 2, "gpusPerReplica": 8},
    "inference": {"replicas": 3, "minAvailable": 1, "gpusPerReplica": 1},
}


class Life:
    """One run in one queue.

    Args:
        kills: function that returns whether the operator is killed instead of write number n, counted from 1.
    """

    def __init__(
        self, *, kills: Callable[[int], bool] = lambda number: False, queue: str = "team-a", **spec: Any
    ) -> None:
        self.kube = Kube(SPEC | spec)
        self.volcano = StandIn()
        self.queue = queue
        self.group: Json | None = None
        self.kills = kills
        self.writes = self.killed = self.made = 0
        self.kube.place = self._node_of

    def subject(self) -> QueuedRun:
        """Run as Volcano's edge reads it."""
        case = RunSnapshot(self.kube.look(), self.kube.now, self.kube.settings, "", 0.0)
        return make_queued_run(case, self.queue, required_pods(case, case.spec) if case.spec is not None else ())

    def step(self) -> Step:
        """Return the next step without executing it."""
        waits = self.volcano.rooms == 0
        queue = volcano.QueueState(self.queue in self.volcano.queues, self.volcano.queues.get(self.queue, ""))
        return volcano.next_step(self.subject(), self.group, queue=queue, event_text=OVERUSED if waits else "")

    def pass_(self) -> bool:
        """Execute one pass of the operator; returns whether it wrote anything."""
        before = self.writes
        while (made := self.step()).write is not None:
            self._count()
            self._do(made.write)
        self.kube.admission = made.answer
        for request in self.kube._requests(self.kube.decide()):
            known = len(self.kube.writes)
            self._count()
            request()
            self.writes -= len(self.kube.writes) == known  # nothing changed
            self.check()
        return self.writes > before

    def _count(self) -> None:
        self.writes += 1
        if self.kills(self.writes):
            self.killed += 1
            raise KilledError

    def _do(self, write: object) -> None:
        if isinstance(write, Create):
            assert self.group is None
            self.group, self.made = copy.deepcopy(dict(write.manifest)), self.made + 1
            self.group["metadata"] |= {"uid": f"group-{self.made}"}
        elif isinstance(write, Edit):
            assert self.group is not None
            self.group = merged(copy.deepcopy(self.group), dict(write.patch))
        else:
            self.group = None

    def settle(self) -> None:
        """Run all controllers and the operator until nothing changes."""
        for _ in range(60):
            try:
                acted = self.pass_()
            except KilledError:
                self.kube.new_operator()
                acted = True
            moved = self.kube.controllers()
            changed = self.volcano.act(self._groups(), self.pods())
            self.group = changed[0] if changed else self.group
            self.check()
            if not (acted or moved or changed):
                return
        raise AssertionError(f"no rest: {self.kube.status}")

    def tick(self, seconds: float = 10.0) -> None:
        """Pass time and settle several times, because the detection of deleted objects takes some seconds."""
        for _ in range(3):
            self.kube.now += seconds
            self.settle()

    def pods(self) -> list[Json]:
        """All pods of the run."""
        return [pod for role in ("trainer", "inference", "orchestrator") for pod in self.kube.pods(role)]

    def check(self) -> None:
        """Check that each pod has the annotation of the run's only group and Volcano's scheduler."""
        for pod in self.pods():
            name = pod["metadata"]["annotations"][GROUP]
            assert (pod["spec"]["schedulerName"], name) == ("volcano", self.subject_name)

    @property
    def subject_name(self) -> str:
        """Name of the run's PodGroup."""
        metadata = self.kube.run["metadata"]
        return volcano.name_of(metadata["name"], metadata["uid"])

    def running(self, step: int = 7) -> Life:
        """Run that trains and has saved step 5."""
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

    @property
    def group_phase(self) -> str:
        return volcano.phase_of(self.group) if self.group is not None else "none"

    def _groups(self) -> list[Json]:
        return [self.group] if self.group is not None else []

    def _node_of(self, pod: Json) -> str | None:
        return (
            "n1" if any(one is pod or one == pod for one in self.volcano.binds(self._groups(), self.pods())) else None
        )
