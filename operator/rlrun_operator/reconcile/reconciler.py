"""One pass over one run: read, admit, decide, act, report."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from rlrun.api.run_status import UNSERVED
from rlrun.backoff import backoff
from rlrun.runtime.printable import bound_message, printable_document
from rlrun_operator.decide import claims
from rlrun_operator.decide.running import TAKEN_SECONDS
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import LEASE, RLRUN
from rlrun_operator.names import Names
from rlrun_operator.reconcile.apply import ACT_SECONDS, Applier, Outcome
from rlrun_operator.reconcile.observe import LookUps, defaults_of, observe_run
from rlrun_operator.reconcile.run_memory import Remembered, RunMemory, events_of, relevant_facts, report_waiting
from rlrun_operator.render.field_origin import explain_refusal
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.event_recorder import Poster
from rlrun_operator.runtime.metrics import Metrics
from rlrun_operator.settings import NetworkSettings, RenderSettings
from rlrun_operator.state import (
    SOON_SECONDS,
    Admission,
    Apply,
    CheckSecret,
    Decision,
    DryRun,
    EventRecord,
    Grow,
    Manifest,
    Observed,
    progress_seconds,
)
from rlrun_operator.status.run_progress import HEARTBEAT_SECONDS, silent_for
from rlrun_operator.times import seconds_of
from rlrun_operator.validate_spec import forget_run

ROUNDS = 4
"""Maximum number of decisions in one pass, if the first ones used an outdated observation."""
KEPT_OUT_SECONDS, LONGEST_KEPT_OUT_SECONDS = 10.0, 60.0
"""Seconds until refused writes are retried: always the first value for quotas, otherwise doubled each time up to the second."""
SETTLE_SECONDS = 0.2
"""Seconds until the pass after own writes, which then covers a burst of events of other controllers."""
log = logging.getLogger(__name__)


class Decide(Protocol):
    """Signature of `rlrun_operator.decide.state_machine.decide`."""

    def __call__(
        self, observed: Observed, now: float, *, settings: RenderSettings, fresh_key: str, random: float
    ) -> Decision: ...


class Queue(Protocol):
    """Queue of runs: the operator's own, or an external one."""

    async def run(self) -> None:
        """Do the queue's background work until it is canceled."""

    async def answer(self, run: Manifest) -> Admission | None:
        """Return the answer for one run; None if it is in no queue, so that its attempts may start."""


@dataclass(frozen=True)
class Dependencies:
    """Clients and caches of a pass."""

    client: Client
    store: Store
    look_ups: LookUps
    poster: Poster
    metrics: Metrics
    queue: Queue | None = None
    """None: every run may start at once."""


class Reconciler:
    """Passes over runs; one instance for all runs.

    Args:
        decide: function that decides the next actions and the status.
        outside: clients and caches.
        settings: settings for rendering children.
        name: name of this operator; runs with another `managedBy` are ignored.
        requeue: `requeue(key, seconds)` queues another pass.
        now: returns seconds since the epoch.
        clock: returns steady seconds.
        random: source of the jitter of backoffs.
    """

    def __init__(
        self,
        *,
        decide: Decide,
        outside: Dependencies,
        settings: RenderSettings,
        name: str = "",
        requeue: Callable[[Key, float], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self._decide = decide
        self._client = outside.client
        self._store = outside.store
        self._look_ups = outside.look_ups
        self._poster = outside.poster
        self._metrics = outside.metrics
        self._queue = outside.queue
        self._settings = settings
        self._name = name
        self._requeue = requeue
        self._now = now
        self._clock = clock
        self._random = random or Random()
        self._applier = Applier(outside.client, outside.store, now, clock)
        self._memories: dict[Key, RunMemory] = {}

    def settle_network(self, network: NetworkSettings) -> None:
        """Replace the settings of the network; the next pass over each run applies them."""
        self._settings = replace(self._settings, network=network)

    async def reconcile(self, key: Key) -> None:
        """Make one pass over a run.

        Raises:
            Exception: the pass has to be retried later.
        """
        started = self._clock()
        outcome = "error"
        try:
            await self._run_pass(key)
            outcome = "ok"
        finally:
            self._metrics.reconcile_seconds.labels(outcome).observe(self._clock() - started)

    async def _run_pass(self, key: Key) -> None:
        """Read, admit, decide, act and report. New facts start another round, at most `ROUNDS` in one pass."""
        memory = self._memories.setdefault(key, RunMemory())
        # Two reads that the watches cannot replace: a foreign object's name, and a Lease whose watch may be silent.
        await self._recheck_taken_name(key, memory)
        await self._read_silent_lease(key, memory)
        until = self._clock() + ACT_SECONDS
        for left in reversed(range(ROUNDS)):
            # Read: the observation of this run from the caches. A deleted run is removed from memory; a run of another operator is ignored.
            observed = self._observe_run(key, memory)
            if observed is None:
                self._memories.pop(key, None)
                forget_run(*key)
                self._metrics.forget_run(key)
                return
            if "deletionTimestamp" in observed.run["metadata"]:
                return  # the garbage collector deletes the children
            if (observed.run.get("spec") or {}).get("managedBy") not in (None, self._name):
                return
            # Admit: the queue answers first, so that its answer is one more fact of the decision.
            if self._queue is not None:
                answer = await self._queue.answer(observed.run)
                refused = answer.refused if answer is not None else ()
                observed = replace(observed, admission=answer, refusals=(*observed.refusals, *refused))
            # Decide: a pure function of the observation, called again if it requests facts that have to be read.
            planned = await self._decide_with_facts(observed, memory)
            # Act: make the writes. A new refusal is kept in memory, and the next round decides with this fact.
            last = left == 0 or self._clock() >= until
            decision = await self._make_writes(key, observed, planned, memory, last=last)
            if decision is None and last:
                break
            if decision is None:
                continue
            # Report: the status is written last, because it must not record actions that did not happen.
            await self._report_status(key, observed.run, decision, memory)
            self._queue_next_pass(key, decision, memory)
            return
        raise UnavailableError("the cluster changes faster than it can be read")

    def _queue_next_pass(self, key: Key, decision: Decision, memory: RunMemory) -> None:
        """Queue the next pass: for a deadline, for the retry of a refused growth, and after own writes."""
        if decision.wake_in is not None:
            self._requeue(key, decision.wake_in)
        if (known := memory.refusals.get("not-grown")) is not None and known.until > self._clock():
            self._requeue(key, known.until - self._clock())
        if any(not isinstance(write, (CheckSecret, DryRun)) for write in decision.writes):
            # The cache contains the responses to these writes already, so no watch event will follow.
            self._requeue(key, SETTLE_SECONDS)

    async def _make_writes(
        self, key: Key, observed: Observed, decision: Decision, memory: RunMemory, *, last: bool
    ) -> Decision | None:
        """Make the writes of a decision, and keep refusals in memory. `last`: whether it is the last decision of this pass.

        Returns:
            the decision to report, or None if a new fact requires another decision first.
        """
        # The time of a repair is recorded before its writes: an error in the middle must not allow another
        # one at once.
        mark, repaired_before = self._settings.network.mark, memory.repaired_at
        if any(isinstance(write, Apply) and write.repairs for write in decision.writes):
            memory.repaired_at = self._clock()
        outcome = await self._applier.make_writes(key[0], decision)
        # A refused growth stops nothing: the next round makes the other writes without it.
        if outcome.kind == "not-grown":
            memory.repaired_at = repaired_before
            self._remember_growth(outcome, memory)
            return None
        if outcome.kind != "stale" and any(isinstance(write, Grow) for write in decision.writes):
            memory.refusals.pop("not-grown", None)
        # The policy for the API server was applied: later decisions compare the current addresses with this mark.
        if outcome.created and outcome.kind in ("done", "not-admitted") and _applies_access_policy(key, decision):
            memory.access = mark
        if outcome.kind == "not-admitted":
            return self._report_refused_writes(key, observed.run, decision, outcome, memory, last=last)
        if outcome.kind == "stale":
            memory.repaired_at = repaired_before  # the changed state may need another repair at once
            log.debug("run %s/%s: %s; deciding again", *key, outcome.text)
            return None
        if outcome.kind != "done":
            self._remember_refusal(observed, outcome, memory)
            return None
        if memory.refusals.pop("not-admitted", None) is not None:
            self._requeue(key, SETTLE_SECONDS)  # this report still names the refused writes
        return decision

    def _remember_refusal(self, observed: Observed, outcome: Outcome, memory: RunMemory) -> None:
        """Keep an invalid child, a taken name or a lost key in memory for the next decision."""
        run, kind, refused = observed.run, outcome.kind, outcome.refused
        assert kind in ("invalid", "name-taken", "key-lost")
        if kind == "invalid" and outcome.child is not None:
            problems = explain_refusal(outcome.child, outcome.causes, outcome.text, run.get("spec") or {})
            refused = tuple(replace(each, text=bound_message(problems)) for each in refused)
        until = self._clock() + TAKEN_SECONDS if kind == "name-taken" else math.inf
        facts = relevant_facts(kind, run, observed.defaults)
        memory.refusals[kind] = Remembered(refused, facts, until, child=outcome.child)

    def _report_refused_writes(
        self, key: Key, run: Manifest, decision: Decision, outcome: Outcome, memory: RunMemory, *, last: bool
    ) -> Decision | None:
        """Return the status of a run with refused writes, and queue a retry; None if a new refusal needs another decision first.

        `last`: a new refusal causes no other decision in this pass, because some webhooks change their message each time.
        """
        # A new refusal is decided on once more, so that its message is in the status of this pass. A known
        # one only has to be retried.
        known = memory.refusals.get("not-admitted", Remembered(()))
        if known.refusals != outcome.refused and not last:
            memory.refusals["not-admitted"] = replace(known, refusals=outcome.refused)
            for each in set(outcome.refused) - set(known.refusals):
                log.warning("run %s/%s: %s %s cannot %s: %s", *key, each.ref.kind, each.ref.name, each.doing, each.text)
            return None
        # A quota is released by the end of other runs, at any time, so its pause does not grow.
        tries = 0 if all(each.quota for each in outcome.refused) else known.tries + 1
        memory.refusals["not-admitted"] = Remembered(outcome.refused, tries=tries)
        wait = backoff(tries, first=KEPT_OUT_SECONDS, longest=LONGEST_KEPT_OUT_SECONDS)
        self._requeue(key, wait)
        return report_waiting(decision, run, made=outcome.created)

    def _observe_run(self, key: Key, memory: RunMemory) -> Observed | None:
        run = self._store.get(RLRUN.kind, *key)
        if run is None:
            return None
        # Refusals that an edit has made obsolete are not part of the observation, so that the decision tries
        # again.
        refusals = tuple(memory.valid_refusals(run, defaults_of(self._store, key[0]), self._clock()))
        repaired_ago = self._clock() - memory.repaired_at
        return observe_run(self._store, key, refusals=refusals, access=memory.access, repaired_ago=repaired_ago)

    async def _recheck_taken_name(self, key: Key, memory: RunMemory) -> None:
        """Check whether a foreign object still has a child's name: one read replaces all the writes that precede this child."""
        known, run = memory.refusals.get("name-taken"), self._store.get(RLRUN.kind, *key)
        if known is None or known.child is None or run is None:
            return
        if known.facts != relevant_facts("name-taken", run, None):  # an edited run may need other names
            del memory.refusals["name-taken"]
        elif self._clock() >= known.until:
            if await self._applier.is_taken(known.child):
                memory.refusals["name-taken"] = replace(known, until=self._clock() + TAKEN_SECONDS)
            else:
                del memory.refusals["name-taken"]

    async def _read_silent_lease(self, key: Key, memory: RunMemory) -> None:
        """Read the Lease of a run without recent reports: the watch may be silent instead of the run."""
        run, name = self._store.get(RLRUN.kind, *key), Names(key[1]).progress
        if run is None or (run.get("status") or {}).get("phase") not in ("Starting", "Running", "Completing"):
            return
        # A live read before a run counts as silent: a broken watch would otherwise end runs that report on
        # time.
        silent = silent_for(self._store.lease_changed_at(key[0], name), self._now())
        if silent < HEARTBEAT_SECONDS or self._clock() - memory.asked_at < HEARTBEAT_SECONDS:
            return
        with contextlib.suppress(ApiError):  # the state of the watch remains
            live = await self._client.get(LEASE, key[0], name)
            if live is not None:
                self._store.put({**live, "kind": LEASE.kind}, self._now())
        memory.asked_at = self._clock()  # not set after an error: the next pass reads again before it decides

    def _remember_growth(self, outcome: Outcome, memory: RunMemory) -> None:
        """Keep a refused growth of the claim in memory with the time of the next try."""
        known, (refused,) = memory.refusals.get("not-grown"), outcome.refused
        before = known.refusals[0].grow if known is not None else None
        # The pause grows only for the same size: an edited size may be accepted.
        same = before is not None and refused.grow is not None and before.target == refused.grow.target
        tries = known.tries + 1 if known is not None and same else 1
        wait = backoff(tries, first=claims.RETRY_SECONDS, longest=claims.LONGEST_RETRY_SECONDS)
        memory.refusals["not-grown"] = Remembered(outcome.refused, until=self._clock() + wait, tries=tries)

    async def _decide_with_facts(self, observed: Observed, memory: RunMemory) -> Decision:
        """Decide; if the decision requests facts that can be read, read them and decide again."""
        # Both decisions of this pass have the same time, random number and key: the second differs only by
        # the facts that were read.
        random, fresh_key, now = self._random.random(), secrets.token_urlsafe(32), self._now()

        def decide_on(given: Observed) -> Decision:
            return self._decide(given, now, settings=self._settings, fresh_key=fresh_key, random=random)

        decision = decide_on(observed)
        refused = memory.refusals_of("not-admitted")
        if decision.look_up or refused:
            of_operator = events_of(refused, observed.run["metadata"]["namespace"])
            observed = await self._look_ups.add_requested_facts(observed, decision.look_up, of_operator)
            if observed.events or observed.nodes is not None:
                decision = decide_on(observed)
        return decision

    async def _report_status(self, key: Key, run: Manifest, decision: Decision, memory: RunMemory) -> None:
        """Write the status if it differs and its write is due, then post the events."""
        old: Mapping[str, object] = run.get("status") or {}
        shown = printable_document(decision.status)  # messages quote pods, events and environments
        assert isinstance(shown, dict)
        decision = replace(decision, status=shown)
        # A CRD of another version drops fields, so that the stored status never equals the decided one.
        # Without the pair of both in memory, each pass would write it again.
        if old == decision.status or memory.sent == (decision.status, old):
            await self._post_events(run, decision.events)
            return
        # A status that may wait is dropped, not queued: the pass at its time decides again, from newer facts.
        wait = memory.written_at + self._seconds_between_writes(run, decision) - self._clock()
        if wait > 0:
            self._requeue(key, wait)
            return
        patch = {
            # Preconditions: the write must not change a successor of the same name, or a version that was not observed.
            "metadata": {name: run["metadata"][name] for name in ("uid", "resourceVersion")},
            "status": merge_patch(old or UNSERVED, decision.status),
        }
        try:
            # A conflict shows a newer version of the run: it is read at once, and the next pass decides on
            # it. A deleted run is removed from the cache, because its watch event may come late.
            written = await self._client.merge_patch(RLRUN, *key, patch, subresource="status")
        except ApiError as error:
            if error.kept_out:  # webhooks refuse with any HTTP status
                raise
            if error.status == 404:
                self._wake_others(key, self._store.remove(RLRUN.kind, *key, run["metadata"]["uid"]))
            elif error.status == 409:
                await self._refresh_run(key)
            else:
                raise
            self._requeue(key, 0.0)
            return
        # The answer goes into the cache before the next pass, which must not decide on the status before this
        # write. Events follow the write that they explain.
        memory.written_at = self._clock()
        memory.sent = (decision.status, written.get("status") or {})
        self._wake_others(key, self._store.put({**written, "kind": RLRUN.kind}, self._now()))
        self._metrics.status_written(key, old, decision.status, self._clock())
        await self._post_events(run, decision.events)

    def _seconds_between_writes(self, run: Manifest, decision: Decision) -> float:
        """Return the minimum number of seconds between the last write of the status and this one."""
        if decision.urgency != "progress":
            return 0.0 if decision.urgency == "now" else SOON_SECONDS
        born = seconds_of(run["metadata"].get("creationTimestamp"))
        return progress_seconds(self._now() - born if born is not None else 0.0, self._store.run_count())

    async def _refresh_run(self, key: Key) -> None:
        """Read a run that another client changed during this pass, instead of waiting for the watch."""
        live = await self._client.get(RLRUN, *key)
        if live is not None:
            self._wake_others(key, self._store.put({**live, "kind": RLRUN.kind}, self._now()))

    def _wake_others(self, key: Key, changed: set[Key]) -> None:
        """Queue the runs that share a trainer with this one: the watch reports no change that the cache already contains."""
        for other in changed - {key}:
            self._requeue(other, 0.0)

    async def _post_events(self, run: Manifest, events: tuple[EventRecord, ...]) -> None:
        for event in events:
            await self._poster.post_event(run, event)


def _applies_access_policy(key: Key, decision: Decision) -> bool:
    """Return whether a decision applies the orchestrator's network policy, which contains the API server's addresses."""
    access = Names(key[1]).orchestrator_access
    return any(
        isinstance(write, Apply) and not write.repairs and write.manifest["metadata"]["name"] == access
        for write in decision.writes
    )


def merge_patch(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON merge patch (RFC 7386) from `old` to `new`."""
    patch: dict[str, object] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            patch[name] = merge_patch(before, value)
        else:
            patch[name] = value
    return patch
