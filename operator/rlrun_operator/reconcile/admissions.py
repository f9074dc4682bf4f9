"""The operator's own queue. It reads runs, pods and nodes, plans with `admit_runs`, and caches the answers for the passes over runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rlrun.api.run_status import RLRunStatus
from rlrun.defaults.team_defaults import apply_defaults
from rlrun_operator.decide import queueing
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import RUN_LABEL
from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.packing import gang_of, held_pods, rooms_of, total_room
from rlrun_operator.queue.queue_model import Applicant, Capacity, PodSet, QueueRules, QueueState, Stage, Verdict
from rlrun_operator.queue.quota import Quota, read_quota
from rlrun_operator.reconcile.observe import LookUps, defaults_of, observe_run
from rlrun_operator.render import render_workloads
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.settings import QueueSettings, RenderSettings
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Admission, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition, is_true
from rlrun_operator.status.wait_facts import QUEUE_LOOKS_SOON
from rlrun_operator.times import seconds_of

PLAN_SECONDS = 1.0
"""Minimum time between two plans, in seconds. A burst of events starts passes over many runs, which then share one plan."""
PLAN_SHARE = 0.1
"""Largest share of the time that is spent on plans: 300 runs on 100 nodes take 0.5 s, and are planned every 5 s."""
_HAVE_ROOM = ("Running", "Complete", "Failed")
"""Phases of runs that do not wait for capacity."""
FREE = Admission(True, reasons.ROOM_FOUND, "a guest needs no room of its own: it has its host's trainer and engines")
"""Answer for a guest; plans do not contain guests."""
OUT = Admission(False, reasons.NOT_QUEUED, "the run needs no capacity now")
"""Answer for a run that does not wait for capacity."""
SOON = Admission(False, reasons.WAITING_FOR_TURN, QUEUE_LOOKS_SOON)
"""Answer for a waiting run that the last plan does not contain."""


@dataclass(frozen=True)
class _Entry:
    key: Key
    applicant: Applicant
    unranked: str
    """Reason why its PriorityClass counts as 0; empty if the class is readable."""


class Admissions:
    """Answers of the queue, from one plan for all runs.

    Args:
        store: cache of the watched objects.
        look_ups: reads of nodes, pods, quotas and priority classes.
        settings: settings of the queue.
        render: settings for rendering pods.
        serves: returns whether this operator manages a run.
        requeue: `requeue(key, seconds)` queues a pass over a run.
        now: returns seconds since the epoch.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        look_ups: LookUps,
        settings: QueueSettings,
        render: RenderSettings,
        *,
        serves: Callable[[Manifest], bool],
        requeue: Callable[[Key, float], None],
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._look_ups = look_ups
        self._settings = settings
        self._rules = rules_of(settings)
        self._render = render
        self._serves = serves
        self._requeue = requeue
        self._now = now
        self._clock = clock
        self._lock = asyncio.Lock()
        self._state = QueueState()
        self._next_at = float("-inf")
        self._answers: dict[str, Admission] = {}
        self._values: dict[str, int | str] = {}
        """Values of the PriorityClasses that are not in the settings, by name; for an unreadable class, the reason."""
        self._gangs: dict[str, tuple[object, tuple[PodSet, ...]]] = {}
        """Rendered pods of each run by its UID, each with the facts that they depend on."""

    async def run(self) -> None:
        """Wait until it is canceled: this queue has no background work, because the passes over runs make its plans."""
        await asyncio.Event().wait()

    async def answer(self, run: Manifest) -> Admission:
        """Return the answer for one run from a recent plan."""
        if host_name(run) is not None:
            return FREE
        # One plan for all runs: passes that wait for the lock use the plan that the first of them makes.
        async with self._lock:
            if self._clock() >= self._next_at:
                await self._update_plan()
        known = self._answers.get(str(run["metadata"]["uid"]))
        if known is not None:
            return known
        # The run may be younger than the plan, or may have started to wait after it.
        entry = self._queue_entry(run, self._now() - self._clock()) if self._serves(run) else None
        if entry is None or entry.applicant.stage != "waiting":
            return OUT
        # The pass at this time makes the next plan.
        self._requeue(entry.key, self._next_at - self._clock())
        return SOON

    async def _update_plan(self) -> None:
        before = self._answers
        capacity, quotas = await self._read_capacity(), await self._read_quotas()
        self._values = await self._look_ups.read_priorities(self._unknown_classes())
        began = self._clock()
        # From here on nothing is awaited, so that the plan reads all runs in one state, and the state of the queue is stored before another
        # plan starts. The wall clock may jump: the queue counts in monotonic seconds, and recorded times are converted to them.
        epoch = self._now() - began
        runs = [run for run in self._store.runs() if self._serves(run)]
        entries = [entry for run in runs if (entry := self._queue_entry(run, epoch)) is not None]
        by_uid = {entry.applicant.uid: entry.key for entry in entries}
        applicants, there = [entry.applicant for entry in entries], capacity(set(by_uid.values()))
        plan = admit_runs(applicants, there, self._rules, self._state, began, epoch=epoch, quotas=quotas)
        self._state = plan.state
        unranked = {entry.applicant.uid: entry.unranked for entry in entries}
        self._answers = {uid: _queue_answer(verdict, unranked[uid]) for uid, verdict in plan.verdicts.items()}
        self._gangs = {uid: gang for uid, gang in self._gangs.items() if uid in by_uid}
        self._next_at = began + max(PLAN_SECONDS, (self._clock() - began) / PLAN_SHARE)
        for uid, answer in self._answers.items():
            known = before.get(uid, OUT)
            # Only answers that change a decision start a pass. Positions change with every plan, and are
            # reported in the next regular pass.
            if (answer.admitted, answer.stops, answer.room) != (known.admitted, known.stops, known.room):
                self._requeue(by_uid[uid], 0.0)

    async def _read_capacity(self) -> Callable[[set[Key]], Capacity | None]:
        """Return a function that returns the capacity, or None if the nodes cannot be read.

        Its argument is the set of keys of the queued runs. Their pods are excluded here, because `Applicant.pods` contains them.
        """
        if self._settings.capacity:
            total = Capacity((total_room(self._settings.capacity),), "cluster")
            return lambda keys: total
        nodes, pods = await self._look_ups.nodes_and_pods()
        if nodes is None or pods is None:
            return lambda keys: None
        return lambda keys: Capacity(rooms_of(nodes, [pod for pod in pods if _run_of(pod) not in keys]))

    async def _read_quotas(self) -> dict[str, list[Quota]]:
        """Return the ResourceQuotas of the namespaces with runs that may wait."""
        places = {
            str(run["metadata"]["namespace"])
            for run in self._store.runs()
            if (run.get("status") or {}).get("phase") not in _HAVE_ROOM and self._serves(run)
        }
        found = await self._look_ups.quotas(places)
        return {
            namespace: [quota for each in manifests if (quota := read_quota(each)) is not None]
            for namespace, manifests in found.items()
        }

    def _queue_entry(self, run: Manifest, epoch: float) -> _Entry | None:
        """Return the queue's view of a run, or None if it neither needs nor holds capacity; `epoch`: wall clock minus monotonic clock."""
        metadata = run["metadata"]
        key = (str(metadata["namespace"]), str(metadata["name"]))
        if host_name(run) is not None or (found := observe_run(self._store, key)) is None:
            return None
        # No API key and no random number: this snapshot is only read, not decided on.
        snapshot = RunSnapshot(found, self._now(), self._render, "", 0.0)
        stage = stage_of(snapshot)
        if stage is None:
            return None
        admitted = find_condition(snapshot.past.conditions, reasons.ADMITTED)
        applicant = Applicant(
            uid=str(metadata["uid"]),
            namespace=key[0],
            name=key[1],
            gang=self._render_gang(snapshot),
            stage=stage,
            since=_waiting_since(snapshot) - epoch,
            priority=self._run_priority(snapshot.applied.run),
            # Read only for an admitted run: the time of its admission.
            started=((seconds_of(admitted.last_transition_time) if admitted is not None else None) or 0.0) - epoch,
            pods=held_pods(found.pods),
            sizes=snapshot.spec.trainer.sizes.allowed
            if snapshot.spec is not None and snapshot.spec.trainer.elastic is not None
            else (),
        )
        return _Entry(key, applicant, self._explain_unranked(snapshot.applied.run))

    def _render_gang(self, snapshot: RunSnapshot) -> tuple[PodSet, ...]:
        """Return the pods that the next attempt needs. They are cached while `mark` is equal, because rendering takes as long as a pass."""
        uid, spec = str(snapshot.metadata["uid"]), snapshot.spec
        if spec is None:
            return ()
        mark = (
            snapshot.generation,
            snapshot.spec_hash,
            snapshot.wanted.engines,
            snapshot.wanted.trainers,
            snapshot.past.excluded_nodes and tuple(node.name for node in snapshot.past.excluded_nodes),
        )
        known = self._gangs.get(uid)
        if known is None or known[0] != mark:
            # `existing` has the rendered workloads that a run of this kind has; nothing is read from the cluster.
            made = render_workloads(snapshot.context(spec, max(snapshot.attempt, 1))).existing
            trainers = spec.trainer.elastic.min if spec.trainer.elastic is not None else None
            gang = gang_of(made, engines_needed=snapshot.wanted.engines_needed, trainers_needed=trainers)
            known = self._gangs[uid] = (mark, gang)
        return known[1]

    def _run_priority(self, run: Manifest) -> int:
        own, name = _run_ranks(run)
        given = self._settings.priority_classes.get(name)
        value = own or (self._values.get(name, 0) if given is None else given)
        return value if isinstance(value, int) else 0

    def _explain_unranked(self, run: Manifest) -> str:
        own, name = _run_ranks(run)
        why = "" if own or name in self._settings.priority_classes else self._values.get(name, "")
        return f"its priority counts as 0: PriorityClass {name} {why}" if why and isinstance(why, str) else ""

    def _unknown_classes(self) -> set[str]:
        """Return the names of the runs' PriorityClasses that are not in the settings."""
        runs = [run for run in self._store.runs() if self._serves(run)]
        ranks = [
            _run_ranks(apply_defaults(run, defaults_of(self._store, str(run["metadata"]["namespace"]))).run)
            for run in runs
        ]
        return {name for own, name in ranks if name and not own} - self._settings.priority_classes.keys()


def _run_ranks(run: Manifest) -> tuple[int, str]:
    """Return the `priority` of a run (0: unset) and the PriorityClass of its trainer (empty: unset)."""
    spec = run.get("spec")
    block = spec if isinstance(spec, dict) else {}
    own, trainer = block.get("priority"), block.get("trainer")
    name = trainer.get("priorityClassName") if isinstance(trainer, dict) else None
    return own if isinstance(own, int) else 0, name if isinstance(name, str) else ""


def rules_of(settings: QueueSettings) -> QueueRules:
    """Return the rules of admission from the settings."""
    return QueueRules(
        weights=settings.weights,
        preemption=settings.preemption,
        pass_seconds=settings.pass_seconds,
        reserve_seconds=settings.reserve_seconds,
        start_seconds=settings.start_seconds,
    )


def stage_of(snapshot: RunSnapshot) -> Stage | None:
    """Return the stage of a run in the queue, or None if it neither needs nor holds capacity."""
    past: RLRunStatus = snapshot.past
    holds = bool(snapshot.pods)
    if is_true(past.conditions, reasons.COMPLETE) or is_true(past.conditions, reasons.FAILED):
        return None  # its remaining pods may stay for any time, and count like foreign pods
    complete = find_condition(past.conditions, reasons.COMPLETE)
    is_ending = complete is not None and complete.reason == reasons.COMPLETING
    if "deletionTimestamp" in snapshot.metadata or is_ending:
        return "leaving" if holds else None
    suspended = find_condition(past.conditions, reasons.SUSPENDED)
    at_rest = suspended is not None and suspended.status == "True"
    if suspended is not None and suspended.reason == reasons.SUSPENDING:
        return "leaving"
    if queueing.shall_rest(snapshot):
        return "leaving" if holds else None
    admitted = find_condition(past.conditions, reasons.ADMITTED)
    if admitted is None and past.attempt and not at_rest:
        return "holding"  # it started before the queue was enabled
    if admitted is not None and admitted.status == "True":
        return "holding"
    return "waiting" if snapshot.spec is not None else None


def _waiting_since(snapshot: RunSnapshot) -> float:
    """Return the time since which a run waits: the recorded time, else its creation if it has never started, else now."""
    if snapshot.past.queue is not None and (found := seconds_of(snapshot.past.queue.since)) is not None:
        return found
    born = seconds_of(snapshot.metadata.get("creationTimestamp"))
    return born if born is not None and not snapshot.past.attempt else snapshot.now


def _queue_answer(verdict: Verdict, unranked: str) -> Admission:
    return Admission(
        admitted=verdict.admitted,
        reason=verdict.reason,
        message=f"{verdict.message}; {unranked}" if unranked and verdict.position is not None else verdict.message,
        stops=verdict.stops,
        position=verdict.position,
        waiting=verdict.waiting,
        room=verdict.room,
    )


def _run_of(pod: Manifest) -> Key | None:
    name = (pod["metadata"].get("labels") or {}).get(RUN_LABEL)
    return (str(pod["metadata"].get("namespace")), str(name)) if name else None
