"""Shares of namespaces: the weighted dominant share (Ghodsi et al., NSDI 2011), current and past."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlrun_operator.queue.model import Amounts, Applicant, Capacity, QueueRules

PAST_WEIGHT = 4.0
"""Weight of a namespace's past share relative to its current one: gangs are large, so an error of a few hundredths matters little."""


def total_capacity(capacity: Capacity | None) -> dict[str, float] | None:
    """Return the total of all rooms for runs of the queue, or None if unknown."""
    if capacity is None:
        return None
    total: dict[str, float] = {}
    for room in capacity.rooms:
        for name, amount in room.total.items():
            total[name] = total.get(name, 0.0) + max(0.0, amount - room.others.get(name, 0.0))
    return total


def scarce_resources(amounts: Amounts) -> frozenset[str]:
    """Return the resources that count: devices, or without devices all but the number of pods."""
    return frozenset(name for name in amounts if "/" in name) or frozenset(amounts) - {"pods"}


def dominant_share(amounts: Amounts, total: Amounts | None) -> float:
    """Return the largest share of a resource in its total; only devices count if any are requested. Without a total: number of devices."""
    counted = scarce_resources(amounts)
    if total is None:
        return sum(amounts[name] for name in counted if "/" in name) or 1.0
    return max((amounts[name] / total[name] for name in counted if total.get(name)), default=0.0)


@dataclass
class Shares:
    """Shares of namespaces during an admission pass.

    Attributes:
        rules: settings.
        total: total of all rooms; None: unknown.
        past: mean past share, decayed.
        now: current share.
    """

    rules: QueueRules
    total: Amounts | None
    past: Mapping[str, float]
    now: dict[str, float]
    demand: frozenset[str]
    """Namespaces with a running or waiting run."""

    def share_of(self, run: Applicant) -> float:
        """Return the share of one run."""
        return dominant_share(run.total, self.total)

    def add(self, run: Applicant) -> None:
        """Add the share of an admitted run."""
        self.now[run.namespace] = self.now.get(run.namespace, 0.0) + self.share_of(run)

    def order(self, run: Applicant) -> tuple[float, float, float, str]:
        """Return the sort key of a waiting run: priority, its namespace's share, arrival."""
        share = PAST_WEIGHT * self.past.get(run.namespace, 0.0) + self.now.get(run.namespace, 0.0)
        return -run.priority, round(share / self.rules.weight(run.namespace), 9), run.since, run.uid

    def entitled(self, namespace: str) -> float:
        """Return the entitlement of a namespace while others have demand."""
        weights = sum(self.rules.weight(each) for each in self.demand | {namespace})
        return self.rules.weight(namespace) / weights


def shares_of(
    rules: QueueRules,
    total: Amounts | None,
    past: Mapping[str, float],
    runs: Iterable[Applicant],
    waiting: Iterable[Applicant],
) -> Shares:
    """Return the shares with these admitted and waiting runs."""
    runs = list(runs)
    shares = Shares(rules, total, past, {}, frozenset(run.namespace for run in (*runs, *waiting)))
    for run in runs:
        shares.add(run)
    return shares


def decay_shares(
    past: Mapping[str, float], now: Mapping[str, float], seconds: float, half_life: float
) -> dict[str, float]:
    """Return the mean shares after `seconds` with the shares of `now`."""
    kept = 0.5 ** (max(0.0, seconds) / half_life)
    mean = {name: past.get(name, 0.0) * kept + now.get(name, 0.0) * (1 - kept) for name in {*past, *now}}
    return {name: share for name, share in mean.items() if share > 1e-6}
