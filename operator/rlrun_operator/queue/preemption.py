"""Resources that admitted runs hold, and the runs that must release theirs.

A run whose pods find no node is released. For a waiting run only needed runs are preempted, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlrun.backoff import backoff
from rlrun_operator.queue.packing import Rooms, larger_amounts, place_gang, sum_amounts
from rlrun_operator.queue.queue_model import Amounts, Applicant, PodSet, QueueRules, QueueState
from rlrun_operator.queue.shares import Shares

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 30.0, 600.0
"""Wait of a released run, in seconds, doubled at each release."""


@dataclass
class Held:
    """Result for all runs that hold resources."""

    charges: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Charged amounts by UID and room."""
    lacking: dict[str, float] = field(default_factory=dict)
    """See `QueueState.lacking`."""
    homeless: set[str] = field(default_factory=set)
    """UIDs of runs without room for their missing pods."""


def pods_without_node(run: Applicant) -> tuple[PodSet, ...]:
    """Return the pods of a run's gang that have no node."""
    result = []
    for pods in run.gang:
        own = [pod for pod in run.pods if pod.role == pods.role and not pod.spot]
        there = sum(1 for pod in own if not pod.ending and pod.node is not None)
        if there < pods.count:
            result.append(replace(pods, count=pods.count - there))
    return tuple(result)


def lacks_pods(run: Applicant) -> bool:
    """Return whether fewer of a run's pods have nodes than it needs."""
    missing = {pods.role: pods.count for pods in pods_without_node(run)}
    return any(
        missing.get(pods.role, 0) > pods.count - (pods.count if pods.least is None else min(pods.least, pods.count))
        for pods in run.gang
    )


def bound_requests(rooms: Rooms, run: Applicant, *, ending: bool) -> dict[str, dict[str, float]]:
    """Return the requests of a run's pods that have a node, by room."""
    single = next((name for name, room in rooms.by_name.items() if room.node is None), None)
    found = [(single or pod.node, pod.requests) for pod in run.pods if pod.ending == ending and pod.node is not None]
    return sum_amounts((room, amounts) for room, amounts in found if room is not None)


def charge_holdings(
    rooms: Rooms | None, runs: Sequence[Applicant], leaving: Sequence[Applicant], state: QueueState, now: float
) -> Held:
    """Charge the resources of runs, and record which admitted runs lack pods.

    Args:
        rooms: free resources; None: unknown.
        runs: admitted runs.
        leaving: runs that are releasing their resources. Until one has recorded that, its missing pods may still be created.
        state: state of the previous pass.
        now: seconds, of the same clock as the times of runs.
    """
    held = Held()
    for run in runs:
        if lacks_pods(run):
            ends = any(pod.ending for pod in run.pods)  # its next pods cannot exist yet
            held.lacking[run.uid] = now if ends else state.lacking.get(run.uid, now)
    if rooms is None:
        return held
    # Two rounds: first the pods that have nodes, which nothing can take away, then the missing pods of all
    # runs by rank. In one round a missing pod could be charged to room that another run occupies.
    for run in (*leaving, *runs):  # pods with a node occupy it, even against a reservation
        held.charges[run.uid] = add_amounts(
            bound_requests(rooms, run, ending=False), bound_requests(rooms, run, ending=True)
        )
        rooms.charge_all(held.charges[run.uid])
    for run in (*leaving, *sorted(runs, key=_release_rank)):
        if run.stage != "leaving" and pods_without_node(run):
            _charge_missing_pods(rooms, run, held)
    return held


def _charge_missing_pods(rooms: Rooms, run: Applicant, held: Held) -> None:
    """Charge room for the missing pods of a run, or record that there is none."""
    # The run's own terminating pods make room for its next pods, so they are not in the way of these.
    ending = bound_requests(rooms, run, ending=True)
    rooms.charge_all(ending, -1.0)
    placed = place_gang(rooms, pods_without_node(run))
    if placed is None and run.uid in held.lacking:
        held.homeless.add(run.uid)
    # Only its own next pods may use the room of the run's terminating pods.
    more = larger_amounts(placed or {}, ending)
    rooms.charge_all(more)
    held.charges[run.uid] = add_amounts(bound_requests(rooms, run, ending=False), more)


def run_to_release(held: Held, runs: Sequence[Applicant], rules: QueueRules, now: float) -> Applicant | None:
    """Return the run to release because not all of its pods got a node in time, or None.

    Only one at a time, the last by rank: the resources that it releases may be sufficient for the others.
    """
    late = []
    for run in runs:
        # A run without any room for its pods is released earlier than one whose pods are only late.
        limit = min(rules.displaced_seconds, rules.start_seconds) if run.uid in held.homeless else rules.start_seconds
        if run.uid in held.lacking and now - held.lacking[run.uid] >= limit:
            late.append(run)
    return max(late, key=_release_rank, default=None)


def backed_off(tries: Mapping[str, tuple[int, float]], uid: str, now: float) -> tuple[int, float]:
    """Return the number of releases of a run including this one, and the time until which it waits."""
    count = tries.get(uid, (0, 0.0))[0] + 1
    return count, now + backoff(count, first=FIRST_BACKOFF_SECONDS, longest=LONGEST_BACKOFF_SECONDS)


def _release_rank(run: Applicant) -> tuple[float, float, str]:
    return -run.priority, run.started, run.uid


def add_amounts(one: Mapping[str, Amounts], other: Mapping[str, Amounts]) -> dict[str, dict[str, float]]:
    """Return the sum of both, room by room."""
    return sum_amounts([*one.items(), *other.items()])


_CLOSE = 1e-9
Charges = Mapping[str, Mapping[str, Amounts]]
"""Charged amounts by UID and room."""


def choose_victims(
    rooms: Rooms, head: Applicant, holding: Iterable[Applicant], charges: Charges, shares: Shares, now: float
) -> tuple[list[Applicant], dict[str, dict[str, float]]] | None:
    """Return the runs to suspend so that `head` fits, and its room then, or None if no choice is enough.

    Args:
        rooms: free amounts after all leaving runs have ended.
        head: first waiting run.
        holding: admitted runs.
        charges: resources that these runs hold.
        shares: shares of all namespaces.
        now: seconds, of the same clock as the times of runs.
    """
    chosen: list[Applicant] = []
    trial = rooms.copy()
    left = dict(shares.now)
    # Cheapest victims first, until the head fits. Nothing is preempted if even all of them are not enough.
    for run in sorted(holding, key=lambda run: _victim_key(run, shares)):
        # Each victim lowers the share of its namespace in `left`, so that several victims together do not
        # take more than what is above its entitlement.
        if not _may_preempt(run, head, shares, left, now):
            continue
        trial.charge_all(charges.get(run.uid, {}), -1.0)
        left[run.namespace] = left.get(run.namespace, 0.0) - shares.share_of(run)
        chosen.append(run)
        if place_gang(trial, head.gang) is not None:
            return _spare_unneeded(trial, head, chosen, charges)
    return None


def _spare_unneeded(
    trial: Rooms, head: Applicant, chosen: Sequence[Applicant], charges: Charges
) -> tuple[list[Applicant], dict[str, dict[str, float]]]:
    """Return the chosen runs without unneeded ones; the most valuable run is spared first."""
    kept = list(chosen)
    # A later victim may have made an earlier one unnecessary: large gangs fit only on certain nodes.
    for run in reversed(chosen):
        spared = trial.copy()
        spared.charge_all(charges.get(run.uid, {}))
        if place_gang(spared, head.gang) is not None:
            trial, kept = spared, [other for other in kept if other is not run]
    return kept, place_gang(trial, head.gang) or {}


def _may_preempt(run: Applicant, head: Applicant, shares: Shares, left: Mapping[str, float], now: float) -> bool:
    """Return whether `run` may be suspended for `head`.

    For a share, only if the victim's namespace keeps its entitlement and the head's namespace does not exceed its own afterwards: neither
    of them could then do the same to the other.
    """
    rules: QueueRules = shares.rules
    if rules.preemption == "Never":
        return False
    if run.priority != head.priority:
        return run.priority < head.priority
    if rules.preemption != "PriorityAndShare" or run.namespace == head.namespace:
        return False
    # Two namespaces near their shares could otherwise preempt each other as fast as runs start. Priorities
    # are not protected: they never change sides.
    if now - run.started < rules.protect_seconds:
        return False
    keeps = left.get(run.namespace, 0.0) - shares.share_of(run) >= shares.entitlement_of(run.namespace) - _CLOSE
    gets = shares.now.get(head.namespace, 0.0) + shares.share_of(head) <= shares.entitlement_of(head.namespace) + _CLOSE
    return keeps and gets


def _victim_key(run: Applicant, shares: Shares) -> tuple[float, float, float, str]:
    """Return the sort key of a victim: lowest priority, namespace furthest over its share, latest start."""
    over = shares.now.get(run.namespace, 0.0) - shares.entitlement_of(run.namespace)
    return run.priority, -round(over, 9), -run.started, run.uid
