"""A run with its operator and surroundings. The history determines the events and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlrun_operator.decide.reading import read_status
from rlrun_operator.kube.resources import RLRUN
from rlrun_operator.reconcile.cache_feed import PRUNE_SECONDS
from rlrun_operator.status.conditions import find_condition
from tests.sim import invariants
from tests.sim.cluster.admission import FOR_GOOD
from tests.sim.cluster.api import Json
from tests.sim.cluster.fleet import Fleet
from tests.sim.cluster.nodes import NODES
from tests.sim.cluster.volume import CHECKPOINT_EVERY
from tests.sim.operator.process import Process, Request
from tests.sim.operator.queued import Others
from tests.sim.surroundings import NAME, Surroundings

MAX_RESTARTS = 2
MAX_STEPS = 40
SPEC: Json = {
    "model": {"path": "/models/a"},
    "environments": [{"id": "reverse-text"}],
    "trainer": {"replicas": 2},
    "inference": {"replicas": 1},
    "maxSteps": MAX_STEPS,
    "failurePolicy": {"maxRestarts": MAX_RESTARTS, "backoff": {"initialSeconds": 4, "maxSeconds": 20}},
}
WITH_GPUS: Json = {
    **SPEC,
    "trainer": {"replicas": 2, "gpusPerReplica": 2},
    "inference": {"replicas": 1, "gpusPerReplica": 1},
}
"""Specification of one history in eight, because GPU time causes more statuses and the other histories cover the rest."""
ELASTIC: Json = {"min": 2, "waitSeconds": 20, "growSeconds": 60}
OF_ELASTIC: Json = {
    "trainer": {"replicas": 3, "elastic": ELASTIC},
    "maxSteps": 2000,
    "checkpoint": {"interval": CHECKPOINT_EVERY},
}
SPOT: Json = {"share": 0.5, "nodeSelector": {"capacity": "spot"}}
OF_ENGINES: tuple[Json, ...] = (
    {"autoscale": {"min": 1, "max": 6, "stabilizationSeconds": 20}, "spot": SPOT},
    {"replicas": 4, "spot": SPOT},
)
"""Engines of the engine histories; every other history has an autoscaled number."""
REST_ROUNDS = 160
REST_SECONDS = 3 * PRUNE_SECONDS
"""Time after the last fault in which the run must reach its target state: the second relist finds any lost event."""
STAND_SECONDS = 100.0
LAST_WORDS_SECONDS = 30.0
"""Additional time of a queue that takes its room back: it explains this, and then waits for its next pass and the
patience of the next attempt.
"""
LEASE_SECONDS = 60.0
"""A leader that is idle this long loses the leadership, and no watch is later."""
"""A wait is explained anew at least every 60 s."""
PAST = 40
"""Events that a watch may repeat."""
WAITS = 10
"""Number of wakeups without effect after which only a relist can help."""
REQUESTS_OF_A_PASS = 60
IDLE_PASSES = 20
"""Passes in a row while no time passes: each serves one run and sees nothing new."""


class ViolationError(AssertionError):
    """A broken invariant."""


class World(Surroundings):
    """One run in its namespace, with its operator.

    Args:
        spec: fields of the specification in addition to the smallest one.
        seed: seed of the operator's jitter and of the ends of pods.
        document: any run as its author wrote it; then only the invariants of any document are checked.
        queued: whether the operator has a queue.
        elastic: whether the trainer has fewer pods while nodes are missing.
        engines: whether some engines are on interruptible nodes and their number may follow a load.
    """

    def __init__(
        self,
        spec: Json | None = None,
        seed: int = 0,
        *,
        document: Json | None = None,
        queued: bool = False,
        elastic: bool = False,
        engines: bool = False,
    ) -> None:
        super().__init__()
        self.cluster.ends_in_view = seed % 6 == 5
        self.faults: list[str] = []
        """Faults of the operator's next requests."""
        self.deaf = 0
        """Number of next trainer and orchestrator workloads whose creation is reported by neither response nor watch."""
        self.news: list[tuple[str, Json]] = []
        """Events that the watches have not delivered yet."""
        self.misses = False
        """Whether the operator's cache may be incomplete until the next relist."""
        self.lives = 0
        self.rival: Process | None = None
        """Another operator of the same runs, like two releases of the chart that watch one namespace."""
        self.rivals = 0
        """Number of such operators so far."""
        self._rival_news: list[tuple[float, str, Json]] = []
        self._rival_at = 0.0
        """Time of its last work."""
        self._past: list[tuple[str, Json]] = []
        """Latest events, delivered or not: a watch that restarts earlier delivers all of them."""
        self._seed = seed
        base = WITH_GPUS if seed % 16 in (11, 14) and not elastic else SPEC
        self.spec = base | (OF_ELASTIC if elastic else {}) | (spec or {})
        self.elastic = ELASTIC if elastic else None
        if engines:
            self.spec = self.spec | {"inference": OF_ENGINES[seed % 2], "maxSteps": 2000}
            self.cluster.fleet = Fleet()
        self._document = document
        self.others = Others() if queued else None
        """Other runs of the queue."""
        self.memory = invariants.Memory()
        self._create()
        self.operator = self._start()

    # ---- the run

    @property
    def status(self) -> Json:
        return (self.run or {}).get("status") or {}

    def _create(self) -> None:
        document = {"apiVersion": RLRUN.api_version, "kind": RLRUN.kind, "metadata": {"name": NAME}, "spec": self.spec}
        self.api.add(document | (self._document or {}))
        before = self.memory
        self.memory = invariants.Memory(
            failures_before=self.cluster.failures, made_late=before.made_late, actions=before.actions
        )  # like the API server's count of writes, that of the events continues
        self.memory.refused_for_good = any(refusal.sort == FOR_GOOD for refusal in self.api.refusals)

    def recreate(self) -> None:
        """Delete the run and create another one of its name immediately, without any event delivered yet."""
        if self.run is not None:
            self.api.drop(RLRUN.kind, NAME)
        self._create()

    def edit(self, **blocks: Any) -> None:
        """Edit the specification."""
        run = self.run
        if run is not None:
            self.api.put(run, spec=run["spec"] | blocks)
            self.memory.was_invalid |= blocks.get("trainer") == {"replicas": 0}

    def annotate(self, **annotations: str) -> None:
        """Write an annotation, which causes a conflict for a concurrent status write."""
        run = self.run
        if run is not None:
            found = run["metadata"].get("annotations") or {}
            self.api.put(run, metadata=run["metadata"] | {"annotations": found | annotations})

    def edit_status(self, **fields: Any) -> None:
        """Write false values into the status."""
        run = self.run
        if run is not None and self.status:
            self.api.put(run, status=self.status | fields)
            self.memory.edited = True

    # ---- the operator

    def _start(self, release: int = 0) -> Process:
        self._take()
        self._remember(self.news)
        self.news.clear()  # a process starts with lists
        self.misses = False
        self.lives += 1
        self._relist_at = self.clock.steady() + PRUNE_SECONDS
        return Process(self.api, self.clock, self._seed + self.lives, self._unexpected, release, self.others)

    def _unexpected(self, error: Exception) -> None:
        raise ViolationError(f"unexpected {type(error).__name__} in a pass: {error}") from error

    def restart_operator(self, release: int | None = None) -> None:
        """End the operator between two requests and start another one of `release`."""
        self.operator.die()
        self.operator = self._start(self.operator.release if release is None else release)

    def replace_operator(self, release: int) -> None:
        """Make another process the leader while the last request of the previous one is in transit."""
        self.late, self.operator = self.operator, self._start(release)

    def start_rival(self, release: int) -> None:
        """Start another operator for the same runs."""
        self._take()
        self._rival_news.clear()
        self._rival_at = self.clock.steady()
        self.rivals += 1
        self.rival = Process(self.api, self.clock, self._seed - self.lives, self._unexpected, release, self.others)

    def end_rival(self) -> None:
        """Remove the second operator."""
        if self.rival is not None:
            self.rival.die()
        self.rival = None

    def rival_operates(self, requests: int, news: int) -> None:
        """Deliver some events to the second operator and let it make some requests."""
        rival = self.rival
        if rival is None:
            return
        if (
            self.clock.steady() - self._rival_at > LEASE_SECONDS
        ):  # its own Lease is lost: it ends after the request in transit
            self._deliver(rival)
            self.start_rival(rival.release)
            return
        self._rival_at = self.clock.steady()
        self._take()
        old = sum(1 for at, _, _ in self._rival_news if self._rival_at - at > LEASE_SECONDS)
        heard, self._rival_news = self._rival_news[: max(old, news)], self._rival_news[max(old, news) :]
        for _, event, found in heard:
            rival.see(event, found)
        present = self._pods()
        while requests:
            asked = rival.asked
            if asked is not None and asked.writes:
                self._complain(invariants.of_request(self, asked, rival))
            if not rival.advance():
                return
            self.memory.made_late |= self._pods() - present  # the decision may be old
            if asked is not None and not asked.looks_for_others:
                requests -= 1
            self.check()

    def late_request(self) -> None:
        """Deliver the late request. Its sender does nothing afterwards, because each write checks the leadership
        first.
        """
        late, self.late = self.late, None
        if late is not None:
            self._deliver(late)

    def _deliver(self, late: Process) -> None:
        if late.asked is not None:
            present = self._pods()
            late.deliver()
            self.memory.made_late |= self._pods() - present
        late.die()
        self.check()

    def operate(self, requests: int | None = None) -> int:
        """Let the operator work until it is idle, or for some requests; return the number of requests."""
        made = idle = 0
        limit = REQUESTS_OF_A_PASS * 4 if requests is None else requests
        while made < limit:
            asked = self.operator.asked
            idle = idle + 1 if asked is None else 0
            if idle > IDLE_PASSES:
                raise ViolationError(
                    f"the operator does not come to rest: {idle} passes at one moment that ask for nothing"
                )
            if (
                asked is not None and asked.looks_for_others
            ):  # the result of such a read matters to no history, so it is not counted
                self.operator.advance("")
                continue
            if asked is not None:
                made += 1
                if asked.writes:
                    self._check_request(asked)
            unheard = self.deaf and asked is not None and invariants.makes_workload(asked)
            fault = "lost" if unheard else self._fault(asked)
            if not self.operator.advance(fault):
                return made
            if unheard:
                self.deaf -= 1
                self.miss(len(self.api.news) + len(self.news))
            if asked is not None and asked.writes:
                self.check()
        if requests is None:
            raise ViolationError(f"the operator does not come to rest: {limit} requests at one moment")
        return made

    def _fault(self, asked: Request | None) -> str:
        if asked is None or not self.faults:
            return ""
        fault = self.faults.pop(0)
        if fault == "conflict" and asked.method == "DELETE":  # the API server retries these itself
            return "broken"
        if fault == "quota" and (asked.method == "DELETE" or not asked.content.startswith("application/apply")):
            return "broken"
        return fault

    def _check_request(self, asked: Request) -> None:
        if self._document is None:
            self._complain(invariants.of_request(self, asked, self.operator))

    def _pods(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.api.all("Pod")}

    def others_want(self, *, hold: bool, take: bool) -> None:
        """Let other runs take or release room, which wakes this run through the queue."""
        if self.others is not None:
            self.others.hold, self.others.take = hold, take
            self.operator.wake()

    # ---- the watches

    def hear(self, count: int | None = None) -> None:
        """Deliver all pending events, or some of them."""
        self._take()
        count = len(self.news) if count is None else count
        heard, self.news = self.news[:count], self.news[count:]
        self._remember(heard)
        for event, found in heard:
            self.operator.see(event, found)

    def miss(self, count: int) -> None:
        """Break the watches: some events are never delivered."""
        self._take()
        self.misses = self.misses or bool(self.news[:count])
        self._remember(self.news[:count])
        del self.news[:count]

    def hear_again(self, count: int) -> None:
        """Deliver some events, and repeat them afterwards."""
        self._take()
        twice = self.news[:count]
        self.hear(count)
        self.news += twice

    def hear_the_past(self, count: int) -> None:
        """Deliver the latest events again."""
        for event, found in self._past[-count:]:
            self.operator.see(event, found)

    def _remember(self, news: Sequence[tuple[str, Json]]) -> None:
        self._past = [*self._past, *news][-PAST:]

    def hear_out_of_order(self) -> None:
        """Swap the next two events, which is possible for different kinds."""
        self._take()
        if len(self.news) > 1:
            self.news[:2] = self.news[1], self.news[0]

    def _take(self) -> None:
        self.news += self.api.news
        if self.rival is not None:
            self._rival_news += [(self.clock.steady(), event, found) for event, found in self.api.news]
        self.api.news.clear()

    def relist(self) -> None:
        """Let the operator compare its store with the cluster, only between two requests, because concurrency is
        tested elsewhere.
        """
        self.operator.relist()
        self.misses = False
        self._relist_at = self.clock.steady() + PRUNE_SECONDS

    # ---- time

    def pass_time(self, seconds: float) -> None:
        self.clock.pass_(seconds)
        if self.clock.steady() >= self._relist_at:
            self.relist()

    def calm(self, rounds: int, steps: int = 1) -> None:
        """Let everything work without faults for some rounds."""
        for _ in range(rounds):
            self.hear()
            self.operate()
            self.cluster.round()
            if steps:
                self.cluster.train(steps, self.total_steps)
            self.pass_time(1.0)
            self.check()

    @property
    def trainers(self) -> int:
        """Return the number of trainer pods of the current attempt."""
        found = self.api.get("StatefulSet", f"{NAME}-trainer")
        return int(self.spec["trainer"]["replicas"]) if found is not None else 0

    @property
    def total_steps(self) -> int:
        spec = (self.run or {"spec": {}})["spec"]
        found = spec.get("maxSteps")
        return found if isinstance(found, int) else MAX_STEPS

    # ---- invariants

    def check(self) -> None:
        """Check all invariants now."""
        if self._document is not None:
            return
        self._complain(invariants.of_state(self))

    def _complain(self, problem: str | None) -> None:
        if problem is not None:
            raise ViolationError(problem)

    def heal(self) -> None:
        """End all faults: nodes are up, pods end, the API answers and the specification is valid."""
        self.faults.clear()
        self.deaf = 0
        self.cluster.lingering.clear()
        self.cluster.room = None
        for node in NODES:
            if node in self.cluster.down:
                self.cluster.start_node(node)
        self.cluster.schedules = self.cluster.binds = self.cluster.starts = True
        self.cluster.uncollected.clear()
        self.cluster.idle.clear()
        self.lifted.add(self.cluster.pool)
        self.lift(self.api.refusals)
        self.remove_foreign()
        self.end_rival()
        self.late_request()
        self.others_want(hold=False, take=False)
        run = self.run
        if run is not None:
            self.edit(trainer=self.spec["trainer"])
            if self.memory.refused_for_good:
                self.edit(seed=100)

    def stand(self) -> None:
        """Keep the situation: within bounded time the status must explain the wait without outdated reasons."""
        self.faults.clear()
        self.learn()
        began, said = self.clock.steady(), list[str]()
        while self.clock.steady() - began < STAND_SECONDS:
            self.hear()
            self.operate()
            if self.others is not None and began + STAND_SECONDS - self.clock.steady() <= LAST_WORDS_SECONDS:
                said.append(str(self.status.get("message")))
            self.cluster.round()
            self.cluster.train(1, self.total_steps)
            self.check()
            self.pass_time(2.0 if self.clock.steady() - began < 10 else 10.0)
        self.hear()
        self.operate()
        self._complain(invariants.told_truly(self, said))

    def rest(self) -> None:
        """End the faults: within bounded time the run must train or have ended for a reason, with all objects as
        specified.
        """
        self.heal()
        began, waits = self.clock.steady(), 0
        for _ in range(REST_ROUNDS):
            self.hear()
            written = self.api.writes
            self.operate()
            moved = self.cluster.round()
            resized = (self.status.get("trainer") or {}).get("size") or invariants.engines_at_rest(self)
            if self.status.get("phase") != "Running" or resized:
                self.cluster.train(1, self.total_steps)
            self.check()
            settled = not (self.api.writes > written or moved or self.news or self.api.news)
            if settled and invariants.at_rest(self) is None:
                break
            waits = waits + 1 if settled else 0
            self._wait(waits)
            if self.clock.steady() - began > REST_SECONDS:
                break
        self._complain(invariants.at_rest(self))
        self._complain(invariants.of_writes(self))

    def _wait(self, waits: int) -> None:
        """Advance the time: briefly while changes occur, otherwise until the operator wakes, and sometimes until its
        relist.
        """
        due = self.operator.queue.next_due()
        pause = 20.0 if (self.status.get("trainer") or {}).get("size") else 1.0
        if waits:
            until = min(self._relist_at, due if due is not None and waits % WAITS else float("inf"))
            pause = max(1.0, until - self.clock.steady())
        self.pass_time(pause)

    def reason(self, kind: str) -> str:
        """Return the reason of a condition, or an empty text."""
        found = find_condition(read_status(self.status).conditions, kind)
        return found.reason if found is not None else ""
