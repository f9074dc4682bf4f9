"""One random cluster with its queue: nodes, arriving and ending runs, a scheduler, and faults.

The run controller is minimal: it creates all pods of a run after it has recorded the admission, and removes all of them
after a checkpoint on request. A delay separates each verdict from its effects.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from rlrun_operator.queue import admit as core
from rlrun_operator.queue.queue_model import (
    Applicant,
    Capacity,
    HeldPod,
    Plan,
    PodSet,
    QueueRules,
    QueueState,
    Room,
    Stage,
)
from tests.sim.queue.promises import GPU, Pass

RECORD_SECONDS, PODS_SECONDS, LEAVE_SECONDS = 2.0, 3.0, 20.0
"""Delays from a verdict to its record, from the record to the pods, and from a stop to their end."""
LOOK_SECONDS = 30.0
"""Interval between checks of a waiting run."""
STILL_SECONDS = 700.0
"""Time without an event after which the world ends."""


@dataclass
class Run:
    """One run of the world."""

    uid: str
    namespace: str
    gang: tuple[PodSet, ...]
    work: float
    """Seconds of training that it needs."""
    came: float
    priority: int = 0
    stage: Stage | None = "waiting"
    """None: the run has ended."""
    started: float = 0.0
    admitted_at: float | None = None
    pods: list[HeldPod] = field(default_factory=list)
    trained: float = 0.0
    saved: float = 0.0
    training_since: float | None = None
    waits: float = 0.0
    """Longest time from its arrival, or from the end of its pods, to the start of training."""
    free_since: float = 0.0
    disturbed: bool = False
    """Whether it lost a node, so that its loss is not the queue's fault."""
    spent: float = 0.0
    """Seconds of training, including lost ones."""
    stops: list[tuple[float, str]] = field(default_factory=list)
    starts: int = 0
    admissions: list[float] = field(default_factory=list)
    """Times of its admissions."""


@dataclass
class Settings:
    """Shape of a world."""

    nodes: dict[str, int]
    """GPUs by node."""
    runs: list[Run]
    rules: QueueRules
    known: str = "nodes"
    """Source of the capacity: nodes, total or blind."""
    uniform: bool = False
    """Whether all pods have equal requests, so that every order of scheduling uses the free GPUs completely."""
    sloppy: bool = False
    """Whether the scheduler packs differently from the queue."""
    losses: list[tuple[float, str, float]] = field(default_factory=list)
    """Time, node and duration of a node loss."""
    restarts: list[float] = field(default_factory=list)
    """Times at which the operator loses its state."""
    until: float = float("inf")
    supply: Callable[[Run, float], Run] | None = None
    """Creates a successor of each started run, so that its namespace always wants more."""


class World:
    """The cluster, event by event."""

    def __init__(self, settings: Settings, rng: Random) -> None:
        self.settings = settings
        self.rng = rng
        self.now = 0.0
        self.nodes = dict(settings.nodes)
        self.runs = {run.uid: run for run in settings.runs}
        self.there: list[Run] = []
        self.state = QueueState()
        self.plan: Plan | None = None
        self.seen: Pass | None = None
        self.passes = 0
        self.fragmented = False
        """Whether the scheduler, which handles pods in order of arrival, has placed some differently from the queue's
        plan.
        """
        self.held: dict[str, float] = {}
        """GPU seconds by namespace, from the first arrival on."""
        self.preemptions: list[tuple[float, str, str]] = []
        """Time, victim and beneficiary."""
        self.watchers: list[Callable[[World, Plan], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._moved = 0.0
        work = sum(run.work for run in settings.runs)
        self._horizon = 12 * STILL_SECONDS + 4 * work if settings.supply is None else float("inf")
        """Time limit: a run that can never have its pods is retried without end."""
        for run in settings.runs:
            self.at(run.came, lambda run=run: self._arrive(run))
        for when, node, lasts in settings.losses:
            self.at(when, lambda node=node: self._lose(node))
            self.at(when + lasts, lambda node=node: self._return(node))
        for when in settings.restarts:
            self.at(when, self._forget)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Schedule an event."""
        self._moved = max(self._moved, when if act != self._look else 0.0)
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def live(self) -> None:
        """Run until no more events occur."""
        self._look()
        while self._events and self.now < self.settings.until:
            when = self._events[0][0]
            self._account(when)
            self.now = when
            while self._events and self._events[0][0] <= when:
                heapq.heappop(self._events)[2]()
            if self.there:
                self._schedule()
                self._decide()

    def _look(self) -> None:
        """Advance the clock of waiting runs; stop if nothing has happened for longer than any wait of the queue."""
        self.at(self.now + LOOK_SECONDS, self._look)
        if self.now - self._moved > STILL_SECONDS or self.now > self._horizon:
            self._events.clear()

    def capacity(self) -> Capacity | None:
        """Return the capacity in the operator's view."""
        if self.settings.known == "blind":
            return None
        if self.settings.known == "total":
            return Capacity((Room("cluster", {GPU: float(sum(self.nodes.values()))}),), "cluster")
        rooms = [Room(n, {GPU: float(g)}, {}, {"metadata": {"name": n}}) for n, g in sorted(self.nodes.items())]
        return Capacity(tuple(rooms))

    def applicants(self) -> list[Applicant]:
        """Return the runs in the operator's view."""
        return [
            Applicant(r.uid, r.namespace, r.uid, r.gang, r.stage, r.came, r.priority, r.started, tuple(r.pods))
            for r in self.there
            if r.stage is not None
        ]

    def used(self, node: str) -> float:
        """Return the GPUs of a node that pods hold."""
        return sum(p.requests[GPU] for run in self.there for p in run.pods if p.node == node)

    def _decide(self) -> None:
        self.passes += 1
        runs, before, rules = self.applicants(), self.state, self.settings.rules
        plan = core.admit_runs(runs, self.capacity(), rules, before, self.now)
        self.state, self.plan = plan.state, plan
        self.seen = Pass(self.now, tuple(runs), rules, before, plan, dict(self.nodes), self.settings.known)
        for watcher in self.watchers:
            watcher(self, plan)
        for run in self.there:
            verdict = plan.verdicts.get(run.uid)
            if verdict is None:
                continue
            if run.stage == "waiting" and verdict.admitted and run.admitted_at is None:
                run.admitted_at = self.now
                self.at(self.now + RECORD_SECONDS * (0.5 + self.rng.random()), lambda run=run: self._record(run))
            elif run.stage == "holding" and verdict.stops:
                run.stops.append((self.now, verdict.reason))
                if verdict.reason == "Preempted":
                    self.preemptions.append(
                        (self.now, run.uid, plan.state.reservation.uid if plan.state.reservation else "")
                    )
                self._stop(run)

    def _arrive(self, run: Run) -> None:
        run.free_since = self.now
        self.there.append(run)

    def _record(self, run: Run) -> None:
        if run.stage != "waiting" or run.admitted_at is None:
            return
        run.stage, run.started = "holding", run.admitted_at
        run.admissions.append(run.admitted_at)
        self.at(self.now + PODS_SECONDS * (0.5 + self.rng.random()), lambda: self._make(run))

    def _make(self, run: Run) -> None:
        if run.stage != "holding" or run.pods:
            return
        run.starts += 1
        run.pods = [HeldPod(s.role, None, s.requests) for s in run.gang for _ in range(s.count)]
        if self.settings.supply is not None and run.starts == 1:
            successor = self.settings.supply(run, self.now)
            self.runs[successor.uid] = successor
            self._arrive(successor)

    def _schedule(self) -> None:
        """Assign nodes to pods: one pod of each run in turn, like a scheduler without gangs."""
        queue = [
            (i, run) for run in self.there if run.stage == "holding" for i, p in enumerate(run.pods) if p.node is None
        ]
        if self.settings.sloppy:
            self.rng.shuffle(queue)
        else:
            queue.sort(key=lambda item: -item[1].pods[item[0]].requests[GPU])
        changed = set()
        for i, run in queue:
            pod = run.pods[i]
            fits = [n for n, gpus in sorted(self.nodes.items()) if gpus - self.used(n) >= pod.requests[GPU]]
            if not fits:
                self.fragmented = not self.settings.uniform
            else:
                best = min(fits, key=lambda n: self.nodes[n] - self.used(n))
                run.pods[i] = replace(pod, node=self.rng.choice(fits) if self.settings.sloppy else best)
                changed.add(run.uid)
        for uid in changed:
            run = self.runs[uid]
            if all(p.node is not None for p in run.pods) and run.training_since is None:
                self._train(run)

    def _train(self, run: Run) -> None:
        run.training_since = self.now
        run.waits = max(run.waits, self.now - run.free_since)
        since = self.now
        self.at(self.now + run.work - run.trained, lambda: self._end(run, since))

    def _pause(self, run: Run) -> None:
        if run.training_since is not None:
            run.trained += self.now - run.training_since
            run.spent += self.now - run.training_since
            run.training_since = None

    def _end(self, run: Run, since: float) -> None:
        if run.training_since != since:
            return
        self._pause(run)
        run.stage, run.pods = "leaving", [replace(p, ending=True) for p in run.pods]
        self.at(self.now + LEAVE_SECONDS * self.rng.random(), lambda: self._over(run))

    def _over(self, run: Run) -> None:
        run.stage, run.pods = None, []
        self.there.remove(run)

    def _stop(self, run: Run) -> None:
        """Suspend the run: save, then end."""
        run.stage, run.admitted_at = "leaving", None
        self._pause(run)
        run.saved = run.trained
        run.pods = [replace(p, ending=True) for p in run.pods if p.node is not None]
        self.at(self.now + LEAVE_SECONDS * (0.2 + self.rng.random()), lambda: self._away(run))

    def _away(self, run: Run) -> None:
        run.pods, run.stage, run.free_since = [], "waiting", self.now
        run.trained = run.saved

    def _lose(self, node: str) -> None:
        self.nodes.pop(node, None)
        for run in self.there:
            if not any(p.node == node for p in run.pods):
                continue
            if run.stage == "leaving":
                run.pods = [p for p in run.pods if p.node != node]
                continue
            self._pause(run)  # its restart recreates all pods but keeps the nodes of the others
            run.disturbed, run.trained = True, run.saved
            run.pods = [replace(p, node=None) if p.node == node else p for p in run.pods]
            run.free_since = self.now

    def _return(self, node: str) -> None:
        self.nodes[node] = self.settings.nodes[node]

    def _forget(self) -> None:
        self.state = QueueState()
        for run in self.there:
            if run.stage == "waiting":
                run.admitted_at = None

    def _account(self, until: float) -> None:
        for run in self.there:
            if run.stage == "holding" and run.training_since is not None:
                gpus = sum(p.requests[GPU] for p in run.pods)
                self.held[run.namespace] = self.held.get(run.namespace, 0.0) + gpus * (until - self.now)
