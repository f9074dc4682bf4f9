"""One admission pass over all runs of an operator. A pure function of its arguments.

In order: charge the resources of admitted runs; release one of them if its pods found no node in time; try the waiting runs by priority,
share and arrival. The first waiting run that does not fit gets help: resources that other runs are releasing, resources of runs that it
may preempt, or, after a long wait, a reservation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from rlrun_operator.queue import preemption as holds
from rlrun_operator.queue.packing import Rooms, place_gang
from rlrun_operator.queue.preemption import choose_victims
from rlrun_operator.queue.queue_model import (
    Applicant,
    Capacity,
    Plan,
    PodSet,
    QueueRules,
    QueueState,
    Reason,
    Reservation,
    Verdict,
)
from rlrun_operator.queue.quota import Quota, Quotas, missing_pods
from rlrun_operator.queue.shares import (
    Patience,
    Shares,
    by_size,
    choose_growth,
    decay_shares,
    describe_missing,
    scarce_resources,
    shares_of,
    total_capacity,
)
from rlrun_operator.times import format_rfc3339

GRANT_SECONDS = 120.0
"""Seconds after which an unrecorded admission is void: the run waits for something other than the queue."""
TRIES = 3
"""Number of consecutive releases after which a run loses the advantage of its priority."""
Placed = dict[str, dict[str, float]]
"""Requests by room."""
HELD = "there is room for all pods of the run"


def admit_runs(
    runs: Iterable[Applicant],
    capacity: Capacity | None,
    rules: QueueRules,
    state: QueueState,
    now: float,
    *,
    epoch: float = 0.0,
    quotas: Mapping[str, Sequence[Quota]] | None = None,
) -> Plan:
    """Decide which runs may create their pods.

    Args:
        runs: all waiting, holding and leaving runs; other runs hold no resources.
        capacity: rooms; None: unknown, then only one run starts at a time.
        rules: settings.
        state: state of the previous pass.
        now: seconds of a steady clock; all times of runs and of the state use it.
        epoch: offset from that clock to seconds since the epoch, for messages.
        quotas: ResourceQuotas by namespace; a run that exceeds one waits, without a reservation or preemption.
    """
    # Each phase uses the results of the one before: charges, then a release, then admissions, then growth with what is left.
    it = _Pass(list(runs), capacity, rules, state, now)
    it.epoch, it.quotas = epoch, Quotas(quotas or {})
    it.charge_admitted_runs()
    it.release_stuck_run()
    it.admit_waiting_runs()
    it.offer_growth()
    return it.make_plan()


class _Pass:
    def __init__(
        self, runs: Sequence[Applicant], capacity: Capacity | None, rules: QueueRules, state: QueueState, now: float
    ) -> None:
        self.rules, self.state, self.now = rules, state, now
        self.epoch, self.quotas = 0.0, Quotas({})
        self._copy_previous_state({run.uid for run in runs}, {run.uid for run in runs if run.stage == "waiting"})
        self.stopping = {r.uid: state.stopping[r.uid] for r in runs if r.uid in state.stopping and r.stage == "holding"}
        self._divide_by_stage(runs)
        self.patience = Patience(state.patient, {run.uid for run in self.waiting}, rules.leave_seconds, now)
        self.rooms = Rooms(capacity) if capacity is not None else None
        self.shares: Shares = shares_of(rules, total_capacity(capacity), {}, self.holding, self.waiting)
        elapsed = now - state.at if state.at is not None else 0.0
        self.shares.past = decay_shares(state.use, self.shares.now, elapsed, rules.half_life_seconds)
        self.verdicts: dict[str, Verdict] = {}
        self._open: tuple[Reservation, Rooms] | None = None
        """Free rooms without the resources of that reservation."""
        self.reservation = self._still_reserved(state.reservation)

    def _copy_previous_state(self, known: Collection[str], waiting: Collection[str]) -> None:
        """Copy from the previous pass: unrecorded admissions, releases and pauses of reservations."""
        state, now = self.state, self.now
        # An admission that its run does not record is void after GRANT_SECONDS: its resources would be held
        # for nobody.
        void = {uid for uid, at in state.granted.items() if now - at >= GRANT_SECONDS}
        self.granted = {uid: at for uid, at in state.granted.items() if uid in waiting and uid not in void}
        self.sized = {uid: size for uid, size in state.sized.items() if uid in self.granted}
        self.tries = {uid: tries for uid, tries in state.tries.items() if uid in known}
        for uid in void & set(waiting):  # something other than the queue keeps the run from starting
            self.tries[uid] = holds.backed_off(self.tries, uid, now)
        self.rests = {uid: until for uid, until in state.rests.items() if uid in known and until > now}

    def _divide_by_stage(self, runs: Sequence[Applicant]) -> None:
        """Divide the runs by stage; a run with an unrecorded admission counts as holding."""
        self.waiting = [run for run in runs if run.stage == "waiting" and run.uid not in self.granted]
        self.holding = [run for run in runs if run.stage == "holding" and run.uid not in self.stopping]
        begin = [replace(run, started=self.granted[run.uid]) for run in runs if run.uid in self.granted]
        self.holding += [run.sized(self.sized[run.uid]) if run.uid in self.sized else run for run in begin]
        self.leaving = [run for run in runs if run.stage == "leaving" or run.uid in self.stopping]

    def charge_admitted_runs(self) -> None:
        """Charge the resources of admitted and leaving runs."""
        self.held = holds.charge_holdings(self.rooms, self.holding, self.leaving, self.state, self.now)
        for run in (*self.holding, *self.leaving):
            self.quotas.charge_existing(run)
        for run in self.holding:
            self.verdicts[run.uid] = Verdict(True, "RoomFound", HELD, room=self.sized.get(run.uid))
            self.quotas.charge_gang(run.namespace, missing_pods(run))
            # All pods have nodes, so the number of releases starts again.
            if run.uid not in self.held.lacking and run.uid not in self.granted:
                self.tries.pop(run.uid, None)
        for uid, (reason, message) in self.stopping.items():
            self.verdicts[uid] = Verdict(False, reason, message)

    def release_stuck_run(self) -> None:
        """Release a run that cannot use its resources."""
        late = holds.run_to_release(self.held, self._recorded_runs(), self.rules, self.now)
        if late is None:
            return
        seconds = self.now - self.held.lacking[late.uid]
        self.tries[late.uid] = holds.backed_off(self.tries, late.uid, self.now)
        message = f"not all of its pods got a node within {seconds:.0f} s; it releases its resources"
        self._stop_run(late, "Released", message)
        # The released resources may be sufficient for the other stuck runs, so each of them waits the full time again.
        self.held.lacking = {uid: self.now for uid in self.held.lacking if uid != late.uid}

    def admit_waiting_runs(self) -> None:
        """Try the waiting runs in order, and help the first one that does not fit."""
        # A reservation for a run that its quota keeps out would only block others.
        kept = self.reservation
        if kept is not None and any(
            run.uid == kept.uid and self.quotas.explain_lack(run.smallest_size) for run in self.waiting
        ):
            self.reservation = None
        ready = [run for run in self.waiting if self.tries.get(run.uid, (0, 0.0))[1] <= self.now]
        pending = sorted(ready, key=self._waiting_order, reverse=True)
        first: Applicant | None = None
        self.blocked: list[Applicant] = []
        while pending:
            run = pending.pop()
            # The largest size that fits now; an elastic run may rather wait for a larger one that others are about to release.
            fitting = ((one, self._room_for(one)) for one in by_size(run))
            one, placed = next(((one, placed) for one, placed in fitting if placed is not None), (run, None))
            larger = self._larger_size_soon(run, one) if placed is not None and one.trainers < run.trainers else None
            if placed is not None and larger is None:
                self._grant_admission(one, placed, fewer=one.trainers < run.trainers)
                pending.sort(key=self._waiting_order, reverse=True)  # the share of its namespace has grown
                continue
            # Only the first blocked run gets help: help for several would reserve or preempt more than the queue can use.
            self.blocked.append(run)
            if first is None and self._may_fit(run.smallest_size):
                first = run
                self._make_room(*larger) if larger is not None else self._make_room(run.smallest_size)

    def offer_growth(self) -> None:
        """Offer more trainer pods to elastic runs, one after the other, while no other run waits."""
        rooms = self.rooms.copy() if self.rooms is not None else None
        # Free resources belong to waiting runs and to admitted runs without room. Only what is left is
        # offered for growth.
        waits = (
            any(run.uid not in self.granted for run in self.waiting) or bool(self.held.homeless) or bool(self.leaving)
        )
        for run in self._recorded_runs():
            larger = [size for size in reversed(run.sizes) if size > run.trainers]
            more = [size for size in larger if self.quotas.allows_growth(run, run.sized(size))]
            if not larger or (more and rooms is None and not waits):
                continue
            held = self.held.charges.get(run.uid, {})
            found = choose_growth(rooms, run, more, held) if rooms is not None and not waits else 0
            self.verdicts[run.uid] = replace(self.verdicts[run.uid], room=found or run.trainers)

    def make_plan(self) -> Plan:
        """Return the outcome of the pass."""
        self._explain_waits()
        state = QueueState(
            at=self.now,
            use=self.shares.past,
            granted=self.granted,
            lacking=self.held.lacking,
            stopping=self.stopping,
            tries=self.tries,
            sized=self.sized,
            reservation=self.reservation,
            rests=self.rests,
            patient={uid: at for uid, at in self.patience.since.items() if uid not in self.granted},
        )
        return Plan(self.verdicts, state)

    def _waiting_order(self, run: Applicant) -> tuple[object, ...]:
        """Return the sort key of a waiting run: priority, reservation, number of releases, share, arrival.

        A run whose pods repeatedly got no nodes comes after all others, because each try would delay them. Several such runs take turns
        regardless of priority, because some may be too large for the cluster.
        """
        priority, *rest = self.shares.sort_key(run)
        count = self.tries.get(run.uid, (0, 0.0))[0]
        return (
            count if count >= TRIES else 0,
            priority,
            self.reservation is None or self.reservation.uid != run.uid,
            count,
            *rest,
        )

    def _room_for(self, run: Applicant) -> Placed | None:
        """Return room for all pods, or None if the run must wait. Without known rooms, a run starts only if no other run is starting."""
        if self.quotas.explain_lack(run):
            return None
        if self.rooms is None:
            return None if self.held.lacking or self.granted or self.leaving else {}
        if any(other.uid in self.held.homeless and other.priority >= run.priority for other in self.holding):
            return None  # an admitted run lacks room: the free resources go to it first, or it is released
        rooms = self._open_to(run)
        return place_gang(rooms, run.gang) if rooms is not None else None

    def _open_to(self, run: Applicant) -> Rooms | None:
        """Return the rooms without reservations of equal or higher priority; None if the run's pods could land on reserved resources.

        The scheduler does not know about reservations. Therefore a run does not start if it needs the same devices and the scheduler could
        place it there now.
        """
        assert self.rooms is not None
        kept = self.reservation
        if kept is None or kept.uid == run.uid or self._holder_priority(kept) < run.priority:
            return self.rooms
        if any(self._may_take_reserved(pods, kept) for pods in run.gang):
            return None
        if self._open is None or self._open[0] is not kept:
            rooms = self.rooms.copy()
            rooms.charge_all(kept.amounts)
            self._open = (kept, rooms)
        return self._open[1]

    def _may_take_reserved(self, pods: PodSet, kept: Reservation) -> bool:
        """Return whether the scheduler could place such a pod on reserved resources that are free and not enough for both."""
        assert self.rooms is not None
        for room, amounts in kept.amounts.items():
            if self.rooms.by_name[room].node is None or self.rooms.find_obstacle(room, pods) is not None:
                continue
            free = self.rooms.free[room]
            both = scarce_resources(amounts) & scarce_resources(pods.requests)
            short = any(free.get(name, 0.0) - amounts[name] < pods.requests[name] for name in both)
            if short and self.rooms.fits_pod(room, pods.requests):
                return True
        return False

    def _larger_size_soon(self, run: Applicant, fitting: Applicant) -> tuple[Applicant, Placed] | None:
        """Return a larger size of an elastic run with its room, if other runs are releasing that room; None: it starts as it fits now."""
        if self.rooms is None:
            return None
        rooms, kept = self.rooms.copy(), self.reservation
        if kept is not None and kept.uid != run.uid and self._holder_priority(kept) >= run.priority:
            rooms.charge_all(kept.amounts)
        leaving = [self.held.charges.get(other.uid, {}) for other in self.leaving]
        found = self.patience.find_larger(run, fitting.trainers, leaving, rooms)
        return None if found is None or self.quotas.explain_lack(found[0]) else found

    def _holder_priority(self, kept: Reservation) -> int:
        return next((run.priority for run in self.waiting if run.uid == kept.uid), 0)

    def _grant_admission(self, run: Applicant, placed: Placed, *, fewer: bool) -> None:
        if self.rooms is not None:
            self.rooms.charge_all(placed)
            self.held.charges[run.uid], self._open = placed, None
        self.quotas.charge_gang(run.namespace, run.gang)
        self.held.lacking[run.uid] = self.now
        self.granted[run.uid] = self.now
        if fewer:
            self.sized[run.uid] = run.trainers
        self.holding.append(replace(run, started=self.now))
        self.shares.add_run(run)
        self.verdicts[run.uid] = Verdict(True, "RoomFound", HELD, room=self.sized.get(run.uid))
        if self.reservation is not None and self.reservation.uid == run.uid:
            self.reservation = None

    def _stop_run(self, run: Applicant, reason: Reason, message: str) -> None:
        self.stopping[run.uid] = (reason, message)
        self.granted.pop(run.uid, None)
        self.holding = [other for other in self.holding if other.uid != run.uid]
        self.leaving.append(run)
        self.verdicts[run.uid] = Verdict(False, reason, message)

    def _may_fit(self, run: Applicant) -> bool:
        """Return whether the run would fit after all runs of the queue have left; True if rooms are unknown.

        A run that exceeds a quota would not: released or reserved resources would be useless for it.
        """
        if self.quotas.explain_lack(run):
            return False
        return self.rooms is None or place_gang(Rooms(self.rooms.capacity), run.gang) is not None

    def _make_room(self, head: Applicant, soon: Placed | None = None) -> None:
        """Preempt or reserve for the first run that does not fit. `soon`: room that leaving runs are releasing for it."""
        if self.rooms is None:
            return
        kept = self.reservation
        # Victims of an earlier pass are still ending. More victims for the same run would be suspended for
        # nothing.
        if kept is not None and kept.uid == head.uid and kept.victims:
            return
        rooms = self.rooms.copy()
        for run in self.leaving:
            rooms.charge_all(self.held.charges.get(run.uid, {}), -1.0)
        # Resources that are being released are enough: they are kept for the head, and nothing is preempted.
        if (placed := soon or place_gang(rooms, head.gang)) is not None:
            self._reserve_room(head, placed, self.rules.leave_seconds, tuple(run.uid for run in self.leaving))
            return
        found = choose_victims(rooms, head, self._recorded_runs(), self.held.charges, self.shares, self.now)
        if found is not None:
            chosen, placed = found
            for run in chosen:
                self._stop_run(run, "Preempted", self._preemption_message(run, head))
            self._reserve_room(head, placed, self.rules.leave_seconds, tuple(run.uid for run in chosen))
        # Without victims the head gets a reservation, but only after others could pass it for `pass_seconds`.
        elif (kept is None or kept.uid != head.uid) and self._has_waited(head):
            self._reserve_room(head, self._soonest_room(rooms, head), self.rules.reserve_seconds, ())

    def _recorded_runs(self) -> list[Applicant]:
        """Return admitted runs with a recorded admission: other runs may still record theirs and would not notice that it is void."""
        return [run for run in self.holding if run.uid not in self.granted]

    def _soonest_room(self, rooms: Rooms, head: Applicant) -> dict[str, dict[str, float]]:
        """Return the room of `head` on the resources of the runs that started first, because they are likely to end first."""
        rooms = rooms.copy()
        for run in sorted(self.holding, key=lambda run: (run.started, run.uid)):
            rooms.charge_all(self.held.charges.get(run.uid, {}), -1.0)
            if (placed := place_gang(rooms, head.gang)) is not None:
                return placed
        return place_gang(Rooms(rooms.capacity), head.gang) or {}

    def _has_waited(self, head: Applicant) -> bool:
        return self.now - head.since >= self.rules.pass_seconds and head.uid not in self.rests

    def _reserve_room(
        self, head: Applicant, amounts: dict[str, dict[str, float]], seconds: float, leaving: tuple[str, ...]
    ) -> None:
        self.reservation = Reservation(head.uid, amounts, self.now, self.now + seconds, leaving)

    def _still_reserved(self, kept: Reservation | None) -> Reservation | None:
        """Return the reservation of the previous pass; None if its run no longer waits, it has expired, or one of its nodes is gone."""
        if kept is None or all(run.uid != kept.uid for run in self.waiting):
            return None
        if self.now >= kept.until:
            # An expired reservation pauses for as long as it lasted, so that one large run does not block
            # smaller ones forever.
            if not kept.victims:
                self.rests[kept.uid] = self.now + self.rules.reserve_seconds
            return None
        if self.rooms is None or any(room not in self.rooms.free for room in kept.amounts):
            return None
        if kept.victims and not any(run.uid in kept.victims for run in self.leaving):
            return replace(
                kept, victims=()
            )  # the victims have ended: the run fits now, unless foreign pods took the room
        return kept

    def _preemption_message(self, run: Applicant, head: Applicant) -> str:
        name = f"{head.namespace}/{head.name}"
        if run.priority < head.priority:
            return f"it releases its resources to run {name}, whose priority is {head.priority} and not {run.priority}"
        return f"it releases its resources to run {name}: namespace {run.namespace} holds more than its share"

    def _explain_waits(self) -> None:
        """Set the verdicts of the runs that continue to wait."""
        blocked = {run.uid for run in self.blocked}
        left = [run for run in self.waiting if run.uid not in self.granted]
        for position, run in enumerate(sorted(left, key=self._waiting_order), 1):
            reason, message = self._wait_of(run) if run.uid in blocked else self._pause_of(run)
            self.verdicts[run.uid] = Verdict(False, reason, message, position, len(left))

    def _pause_of(self, run: Applicant) -> tuple[Reason, str]:
        count, until = self.tries[run.uid]
        often = f", {count} times in a row" if count > 1 else ""
        return (
            "BackingOff",
            f"it had room and did not start{often}; the queue retries at {format_rfc3339(until + self.epoch)}",
        )

    def _wait_of(self, run: Applicant) -> tuple[Reason, str]:
        if message := self.patience.explain_wait(run.uid):
            return "WaitingForTurn", message
        run = run.smallest_size
        if message := self.quotas.explain_lack(run, empty=True):
            return (
                "NeverFits",
                f"{message}, even if nothing else ran; lower the run's requests, or have the quota raised",
            )
        if message := self.quotas.explain_lack(run):
            return "WaitingForResources", f"{message}; free some of it, or have the quota raised"
        if self.rooms is None:
            return (
                "WaitingForTurn",
                "the free resources are unknown, so one run starts at a time, and another one is starting",
            )
        if place_gang(self.rooms, run.gang) is not None:
            kept = self.reservation
            others = [other for other in self.waiting if other.uid != run.uid]
            names = [f"{other.namespace}/{other.name}" for other in others if kept and other.uid == kept.uid]
            if not names:
                return "WaitingForTurn", "there is room, but pods of runs that were admitted before have no nodes yet"
            return "WaitingForTurn", f"there is room, but it is reserved for run {names[0]}, which has waited longer"
        empty = self.rooms.without_pods()
        if (
            place_gang(empty, run.gang) is None
            and place_gang(self.rooms.without_pods(recovered=True), run.gang) is None
        ):
            return "NeverFits", f"{describe_missing(empty, run.gang)}, even if nothing else ran"
        return "WaitingForResources", describe_missing(self.rooms, run.gang)
