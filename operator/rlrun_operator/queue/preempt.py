"""Choice of the runs to preempt for another run: only runs that are needed, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlrun_operator.queue.fit import place_gang
from rlrun_operator.queue.model import Amounts, Applicant, QueueRules
from rlrun_operator.queue.rooms import Rooms
from rlrun_operator.queue.shares import Shares

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
    for run in sorted(holding, key=lambda run: _victim_key(run, shares)):
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
    if now - run.started < rules.protect_seconds:
        return False
    keeps = left.get(run.namespace, 0.0) - shares.share_of(run) >= shares.entitled(run.namespace) - _CLOSE
    gets = shares.now.get(head.namespace, 0.0) + shares.share_of(head) <= shares.entitled(head.namespace) + _CLOSE
    return keeps and gets


def _victim_key(run: Applicant, shares: Shares) -> tuple[float, float, float, str]:
    """Return the sort key of a victim: lowest priority, namespace furthest over its share, latest start."""
    over = shares.now.get(run.namespace, 0.0) - shares.entitled(run.namespace)
    return run.priority, -round(over, 9), -run.started, run.uid
