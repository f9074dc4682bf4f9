"""Ledger of the groups: every group number is dispatched until it is in a batch or dropped. Pure bookkeeping, JSON in and out."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

FORMAT_VERSION = 1


class LedgerError(ValueError):
    """A group is claimed twice."""


@dataclass(frozen=True)
class LedgerState:
    """Ledger in a checkpoint: on resume the open groups are dispatched again, then those from `next_group` on."""

    next_group: int
    """The lowest number that was never dispatched."""
    open_groups: tuple[int, ...]
    """Dispatched, but neither in a batch nor dropped."""
    counters: dict[str, int]
    """Totals since the run began: accepted, dropped/..., cancelled, errors, rollouts, tokens, readmitted, discarded/...,
    removed/..."""

    def settled(self) -> Callable[[int], bool]:
        """Predicate: true if a group is in a batch or dropped."""
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
    """A heap that holds `_again`, and numbers that have left it since."""

    def __post_init__(self) -> None:
        self._queue = sorted(self._again)

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        """Continue from a checkpoint."""
        return cls(state.next_group, Counter(state.counters), set(state.open_groups))

    def state(self) -> LedgerState:
        """State for a checkpoint of this moment."""
        return LedgerState(self.next_group, tuple(sorted([*self._again, *self._out])), dict(self.counters))

    def take(self) -> int:
        """The next group to dispatch: the oldest of those to be dispatched again, else a new one."""
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
        """Dispatch again all groups below `number`, which an earlier attempt dispatched and which are not settled."""
        for group in range(self.next_group, number):
            self._put_back(group)
        self.next_group = max(self.next_group, number)

    def claim(self, group: int) -> None:
        """Count a group that was to be dispatched again as dispatched: an earlier attempt finished it.

        Raises:
            LedgerError: it is settled, or out already.
        """
        self.reach(group + 1)
        if group not in self._again:
            raise LedgerError(f"group {group} is not to be dispatched again")
        self._again.remove(group)
        self._out.add(group)

    def dispatch_again(self, group: int, reason: str) -> None:
        """Dispatch the task of a group once more that gave nothing usable."""
        self._out.remove(group)
        self._put_back(group)
        self.counters[f"cancelled/{reason}"] += 1

    def back(self, group: int) -> None:
        """Let a dispatched group wait again that lacks only its comparison."""
        self._out.remove(group)
        self._put_back(group)

    def drop(self, group: int, reason: str) -> None:
        """Give up a dispatched group; another takes its place."""
        self._out.remove(group)
        self.counters[f"dropped/{reason}"] += 1

    def remove(self, reason: str, tokens: Sequence[int]) -> None:
        """Count rollouts that are not trained on, by the tokens that were sampled for each."""
        self.counters[f"removed/{reason}/rollouts"] += len(tokens)
        self.counters[f"removed/{reason}/tokens"] += sum(tokens)

    def accept(self, groups: Iterable[int]) -> None:
        """Record that dispatched groups are in a batch."""
        for group in groups:
            self._out.remove(group)
            self.counters["accepted"] += 1

    def readmit(self, groups: Iterable[int], dropped: Mapping[int, str] = MappingProxyType({})) -> None:
        """Record the groups of a batch that an earlier attempt made, and those that it gave up before, with the reasons.

        Raises:
            LedgerError: one of the batch was trained or dropped before; nothing is changed.
        """
        wanted = set(groups)
        if taken := sorted(g for g in wanted if g < self.next_group and g not in self._again):
            raise LedgerError(f"groups {taken} are already in an earlier batch")
        end = max([self.next_group, *(group + 1 for group in [*wanted, *dropped])])
        unsettled = {*self._again, *range(self.next_group, end)} - wanted
        given_up = unsettled & set(dropped)
        self._again = unsettled - given_up
        self._queue = sorted(self._again)
        self.next_group = end
        self.counters["accepted"] += len(wanted)
        self.counters.update(f"dropped/{dropped[group]}" for group in given_up)
