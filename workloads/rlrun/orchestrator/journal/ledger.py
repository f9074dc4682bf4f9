"""Ledger of the groups: every group number stays dispatched until it is in a batch or dropped. Pure, with JSON as
state.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

FORMAT_VERSION = 1


class LedgerError(ValueError):
    """Group that is claimed twice."""


@dataclass(frozen=True)
class LedgerState:
    """State of the ledger in a checkpoint. After a resume the open groups are dispatched first, then those from
    `next_group` on.
    """

    next_group: int
    """Lowest number that was never dispatched."""
    open_groups: tuple[int, ...]
    """Dispatched groups that are neither in a batch nor dropped."""
    counters: dict[str, int]
    """Totals since the start of the run: accepted, dropped/..., cancelled, errors, rollouts, tokens, readmitted,
    discarded/..., removed/...
    """

    def settled(self) -> Callable[[int], bool]:
        """Return a predicate that reports whether a group is in a batch or dropped."""
        still_open = frozenset(self.open_groups)
        return lambda group: group < self.next_group and group not in still_open


@dataclass
class Ledger:
    """Numbers of all groups of a run."""

    next_group: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    _again: set[int] = field(default_factory=set)
    _out: set[int] = field(default_factory=set)
    _queue: list[int] = field(default_factory=list)
    """Heap that contains `_again`, and numbers that have left `_again` since."""

    def __post_init__(self) -> None:
        self._queue = sorted(self._again)

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        """Continue from a checkpoint."""
        return cls(state.next_group, Counter(state.counters), set(state.open_groups))

    def state(self) -> LedgerState:
        """Return the current state for a checkpoint."""
        return LedgerState(self.next_group, tuple(sorted([*self._again, *self._out])), dict(self.counters))

    def take(self) -> int:
        """Return the next group to dispatch: the oldest that waits for another dispatch, otherwise a new one."""
        while self._queue:
            group = heapq.heappop(self._queue)
            if group in self._again:
                self._again.remove(group)
                break
        else:
            group, self.next_group = self.next_group, self.next_group + 1
        self._out.add(group)
        return group

    def _put_back(self, group: int) -> None:
        self._again.add(group)
        heapq.heappush(self._queue, group)

    def reach(self, number: int) -> None:
        """Mark all groups below `number` that an earlier attempt dispatched and did not settle for another dispatch."""
        for group in range(self.next_group, number):
            self._put_back(group)
        self.next_group = max(self.next_group, number)

    def claim(self, group: int) -> None:
        """Mark a waiting group as dispatched, because an earlier attempt finished it.

        Raises:
            LedgerError: the group is settled or already dispatched.
        """
        self.reach(group + 1)
        if group not in self._again:
            raise LedgerError(f"group {group} does not wait for another dispatch")
        self._again.remove(group)
        self._out.add(group)

    def dispatch_again(self, group: int, reason: str) -> None:
        """Dispatch the task of a group again after a flight without a usable result."""
        self._out.remove(group)
        self._put_back(group)
        self.counters[f"cancelled/{reason}"] += 1

    def back(self, group: int) -> None:
        """Return a dispatched group that lacks only its comparison to the waiting state."""
        self._out.remove(group)
        self._put_back(group)

    def drop(self, group: int, reason: str) -> None:
        """Drop a dispatched group; another one replaces it."""
        self._out.remove(group)
        self.counters[f"dropped/{reason}"] += 1

    def remove(self, reason: str, tokens: Sequence[int]) -> None:
        """Count rollouts that are not trained on, with the tokens sampled for each."""
        self.counters[f"removed/{reason}/rollouts"] += len(tokens)
        self.counters[f"removed/{reason}/tokens"] += sum(tokens)

    def accept(self, groups: Iterable[int]) -> None:
        """Record that dispatched groups are in a batch."""
        for group in groups:
            self._out.remove(group)
            self.counters["accepted"] += 1

    def readmit(self, groups: Iterable[int], dropped: Mapping[int, str] = MappingProxyType({})) -> None:
        """Record the groups of an earlier attempt's batch, and the groups that it dropped before, with the reasons.

        Raises:
            LedgerError: a group of the batch was trained or dropped before. Nothing is changed.
        """
        wanted = set(groups)
        if taken := sorted(g for g in wanted if g < self.next_group and g not in self._again):
            raise LedgerError(f"groups {taken} are already in an earlier batch")
        end = max([self.next_group, *(group + 1 for group in [*wanted, *dropped])])
        # Groups that the earlier attempt had dispatched before this batch wait for another
        # dispatch, unless it dropped them.
        unsettled = {*self._again, *range(self.next_group, end)} - wanted
        given_up = unsettled & set(dropped)
        self._again = unsettled - given_up
        self._queue = sorted(self._again)
        self.next_group = end
        self.counters["accepted"] += len(wanted)
        self.counters.update(f"dropped/{dropped[group]}" for group in given_up)
