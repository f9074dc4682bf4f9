"""Shares of namespaces: the weighted dominant share (Ghodsi et al., NSDI 2011), now and over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlrun_operator.queue.model import Amounts, Applicant, Capacity, QueueRules

PAST_WEIGHT = 4.0
"""Weight of a namespace's past against its present share: gangs are large, and an error of a few hundredths counts little beside one."""


def total_capacity(capacity: Capacity | None) -> dict[str, float] | None:
    """Total of all rooms for runs of the queue; None: not known."""
    if capacity is None:
        return None
    total: dict[str, float] = {}
    for room in capacity.rooms:
        for name, amount in room.total.items():
            total[name] = total.get(name, 0.0) + max(0.0, amount - room.others.get(name, 0.0))
    return total


def scarce_resources(amounts: Amounts) -> frozenset[str]:
    """Resources that count: devices, or all but the number of pods where there are none."""
    return frozenset(name for name in amounts if "/" in name) or frozenset(amounts) - {"pods"}


def dominant_share(amounts: Amounts, total: Amounts | None) -> float:
    """Largest share of a resource in all of it; devices alone count where any are asked for. Without a total: number of devices."""
    counted = scarce_resources(amounts)
    if total is None:
        return sum(amounts[name] for name in counted if "/" in name) or 1.0
    return max((amounts[name] / total[name] for name in counted if total.get(name)), default=0.0)


@dataclass
class Shares:
    """Shares of namespaces while runs are admitted one after the other.

    Attributes:
        total: what all rooms have; None: not known.
        past: mean share in the past, decayed.
        now: present share.
    """

    rules: QueueRules
    total: Amounts | None
    past: Mapping[str, float]
    now: dict[str, float]
    demand: frozenset[str]
    """Namespaces that have a run or want one."""

    def of(self, run: Applicant) -> float:
        """Share that one run takes."""
        return dominant_share(run.total, self.total)

    def add(self, run: Applicant) -> None:
        """Count an admission."""
        self.now[run.namespace] = self.now.get(run.namespace, 0.0) + self.of(run)

    def order(self, run: Applicant) -> tuple[float, float, float, str]:
        """Sort key of a waiting run: priority, its namespace's share, first come."""
        share = PAST_WEIGHT * self.past.get(run.namespace, 0.0) + self.now.get(run.namespace, 0.0)
        return -run.priority, round(share / self.rules.weight(run.namespace), 9), run.since, run.uid

    def entitled(self, namespace: str) -> float:
        """Share of all that belongs to a namespace while others want theirs."""
        weights = sum(self.rules.weight(each) for each in self.demand | {namespace})
        return self.rules.weight(namespace) / weights


def shares_of(
    rules: QueueRules,
    total: Amounts | None,
    past: Mapping[str, float],
    runs: Iterable[Applicant],
    waiting: Iterable[Applicant],
) -> Shares:
    """Shares with these runs admitted and those waiting."""
    runs = list(runs)
    shares = Shares(rules, total, past, {}, frozenset(run.namespace for run in (*runs, *waiting)))
    for run in runs:
        shares.add(run)
    return shares


def decay_shares(
    past: Mapping[str, float], now: Mapping[str, float], seconds: float, half_life: float
) -> dict[str, float]:
    """Mean shares after `seconds` in which those of `now` were held."""
    kept = 0.5 ** (max(0.0, seconds) / half_life)
    mean = {name: past.get(name, 0.0) * kept + now.get(name, 0.0) * (1 - kept) for name in {*past, *now}}
    return {name: share for name, share in mean.items() if share > 1e-6}
