"""State of every group of an attempt. Two loops share it and never call each other:

    waiting --take--> in flight --end--> finished --batch--> in a batch
       ^                  |                  |
       +------ age, lost engines ------------+---> dropped: failed, filtered, surplus

`Dispatcher` consumes waiting groups and withdrawn groups in flight; `BatchProducer` consumes finished groups. The members of a
group in flight go to the journal one by one (`keep`). All other transitions happen without an `await`, so that a group is always in
exactly one state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.checkpoint import Snapshot
from rlrun.orchestrator.engines.replica import Affinity
from rlrun.orchestrator.groups.filters import Rules, reason_to_drop, rules_of
from rlrun.orchestrator.journal.frames import DroppedEntry, RolloutEntry
from rlrun.orchestrator.journal.journal_writer import Journal
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.recovery import Readmitted, Unfinished
from rlrun.orchestrator.staleness import accepted_at_step, is_fed, split_by_age, too_old
from rlrun.orchestrator.tasks.sampler import Sampler
from rlrun.orchestrator.types import FinishedGroup, Rollout
from rlrun.protocol.files.batch import Dropped
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

MAX_FILTERED_BATCHES = 64
"""Limit of consecutive filtered rollouts, in batches. At the limit the run fails."""

Outcome = FinishedGroup | Literal["engine", "error", "unplayable"] | None
"""End of a flight: a finished group, lost engines, too many errors, an unplayable task, or None after a cancellation.
"""


@dataclass
class Flight:
    """A group in flight."""

    number: int
    version: int
    size: int
    since: float
    affinity: Affinity = field(default_factory=Affinity)
    members: dict[int, Rollout] = field(default_factory=dict)
    """Finished members, which are durable."""
    cut: list[int] = field(default_factory=list)
    """Sampled tokens of each canceled member."""
    task: asyncio.Task[None] | None = None
    expired: bool = False
    surplus: bool = False


@dataclass(frozen=True)
class Batched:
    """Records of the groups in a batch."""

    step: int
    tasks: tuple[tuple[int, int], ...]
    """Group number and task of each group."""
    dropped: tuple[Dropped, ...]
    """Groups dropped since the previous batch."""


class Groups:
    """States of all groups, and the only writer of ledger and sampler.

    Args:
        config: configuration of the role.
        made: last step with a batch.
        ledger: numbers of the groups.
        sampler: choice of each group's task.
        rules: filters and advantages by the environment's label.
        journal: journal in which finished rollouts become durable before they count. None: no restart could use them.
        signal: signal notified after each change.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        made: int,
        ledger: Ledger,
        sampler: Sampler,
        rules: Mapping[str, Rules],
        journal: Journal | None,
        signal: Signal,
    ) -> None:
        self._config, self._journal, self._signal = config, journal, signal
        self.made, self.ledger, self.sampler, self.rules = made, ledger, sampler, rules
        self.in_flight: dict[int, Flight] = {}
        self.withdrawn: deque[Flight] = deque()
        """Groups in flight that are already expired or surplus, to be canceled one after the other."""
        self.finished: list[FinishedGroup] = []
        self.snapshots: dict[int, Snapshot] = {}
        """State of the orchestrator after the batch of each step, until that step is saved."""
        self._unfinished: dict[int, Unfinished] = {}
        """Waiting groups with some finished members."""
        self._aged: set[int] = set()
        """Groups canceled because of their age and unfinished since."""
        self._dropped: list[Dropped] = []
        self._filtered: Counter[str] = Counter()
        """Rollouts filtered since the last unfiltered group, by reason."""

    @classmethod
    def restore(
        cls,
        config: OrchestratorConfig,
        base: Snapshot,
        *,
        made: int,
        tasks: Sequence[int],
        vocabulary: int,
        journal: Journal | None,
        signal: Signal,
    ) -> Groups:
        """Create the groups at the start of an attempt.

        Args:
            config: configuration of the role.
            base: state of the orchestrator at the attempt's base step.
            made: the attempt's base step.
            tasks: number of training tasks of each environment, in the order of the configuration.
            vocabulary: number of tokens of the tokenizer.
            journal: see the class.
            signal: see the class.
        """
        sampler = Sampler.from_config(config, tasks)
        if not sampler.restore(base.sampler, step=base.step, next_group=base.ledger.next_group):
            logger.warning(
                "environments or curricula have changed since the checkpoint; the curriculum pools start empty"
            )
        return cls(
            config,
            made=made,
            ledger=Ledger.restore(base.ledger),
            sampler=sampler,
            rules=rules_of(config, vocabulary=vocabulary),
            journal=journal,
            signal=signal,
        )

    # ---- counts

    @property
    def running(self) -> int:
        """Number of rollouts in flight."""
        return sum(flight.size for flight in self.in_flight.values())

    @property
    def buffered(self) -> int:
        """Number of finished rollouts outside of batches."""
        return sum(len(group.rollouts) for group in self.finished)

    @property
    def accepted(self) -> int:
        """Number of rollouts that are finished or in batches, see `staleness.dispatch_capacity`."""
        return accepted_at_step(self.made, self._config.batch_size) + self.buffered

    def oldest(self) -> str | None:
        """Describe the group that has been in flight longest, or return None."""
        flight = min(self.in_flight.values(), key=lambda flight: flight.since, default=None)
        if flight is None:
            return None
        draw = self.sampler.draw(flight.number)
        label, seconds = self._config.environments[draw.environment].label, time.monotonic() - flight.since
        done = f", {len(flight.members)} of {flight.size} done" if flight.size > 1 else ""
        return f"{label}, task {draw.task}{done}, {seconds:.0f} s"

    def feeds(self, version: int) -> bool:
        """Return whether the next batch may be made while `version` is the newest."""
        return is_fed(self.made + 1, version=version, max_async_level=self._config.algorithm.max_async_level)

    def _is_old(self, version: int, step: int) -> bool:
        limit = self._config.algorithm.max_off_policy_steps
        return too_old(version, step=step, max_off_policy_steps=limit)

    # ---- from waiting to finished

    def take(self, version: int) -> Flight:
        """Put a waiting group in flight. Its finished members stay finished unless they are too old."""
        number = self.ledger.take()
        environment = self._config.environments[self.sampler.draw(number).environment]
        flight = Flight(number, version, environment.group_size, time.monotonic())
        before = self._unfinished.pop(number, None)
        # Too old for the next batch: its finished members could not be part of any batch.
        if before is not None and self._is_old(before.version, self.made + 1):
            self.ledger.counters["discarded/age"] += len(before.members)
        elif before is not None:
            # The version of the oldest member decides when the group is too old.
            flight.version, flight.members = before.version, dict(before.members)
        self.in_flight[number] = flight
        return flight

    async def keep(self, flight: Flight, member: int, rollout: Rollout, *, temperature: float) -> None:
        """Record a finished member, which counts after it is in the journal."""
        if self._journal is not None:
            draw = self.sampler.draw(flight.number)
            label = self._config.environments[draw.environment].label
            await self._journal.add(
                RolloutEntry(flight.number, member, label, draw.task, flight.version, temperature, rollout)
            )
        flight.members[member] = rollout

    def end(self, flight: Flight, outcome: Outcome) -> None:
        """End a group's flight: the group is finished, waits again, or is dropped.

        Raises:
            RoleError: see `settle`.
        """
        number = flight.number
        del self.in_flight[number]
        self._count_removed(flight, outcome)
        # Age and surplus come first: they were decided during the flight, whatever outcome the canceled task reports.
        if flight.expired:
            self._aged.add(number)
            self.ledger.dispatch_again(number, "age")
        elif flight.surplus and (outcome is None or isinstance(outcome, str)):
            self._give_up(DroppedEntry(number, "surplus", None, self.ledger.next_group, flight.version))
        elif outcome == "engine":
            self.ledger.dispatch_again(number, "engine")
            if flight.members:
                self._unfinished[number] = Unfinished(flight.version, flight.members)
        elif isinstance(outcome, str):
            self._aged.discard(number)
            self._give_up(DroppedEntry(number, outcome, None, self.ledger.next_group, flight.version))
        elif outcome is not None:
            self._aged.discard(number)
            self.settle(outcome)
        self._signal.notify()

    def _count_removed(self, flight: Flight, outcome: Outcome) -> None:
        """Count the removed rollouts of a group and their lengths, because long ones are removed more often."""
        if flight.expired:
            reason = "age"
        elif flight.surplus and (outcome is None or isinstance(outcome, str)):
            reason = "surplus"
        elif outcome == "error":
            reason = "error"
        else:
            return
        self.ledger.remove(reason, [*flight.cut, *(rollout.loss_tokens for rollout in flight.members.values())])

    def settle(self, group: FinishedGroup) -> None:
        """Finish or filter a dispatched group that has all members.

        Raises:
            RoleError: too many rollouts in a row were filtered for any batch.
        """
        if reason := reason_to_drop(group, self.rules[group.environment]):
            # The newest version of its tokens: after a restart from an earlier checkpoint that
            # version may be lost, and then the drop does not count either.
            newest = max(int(s.versions.max()) for rollout in group.rollouts for s in rollout.sequences)
            self._give_up(DroppedEntry(group.number, reason, group.mean_reward, self.ledger.next_group, newest))
            self._filtered[reason] += len(group.rollouts)
            if self._filtered.total() >= MAX_FILTERED_BATCHES * self._config.batch_size:
                found = ", ".join(f"{reason}: {count}" for reason, count in sorted(self._filtered.items()))
                raise RoleError(
                    f"the last {self._filtered.total()} rollouts were all filtered ({found}), so no batch can be made; relax "
                    "algorithm.filters or the curriculum, increase groupSize, or choose other tasks",
                    exit_codes.DATA,
                )
        else:
            # Only consecutive filtered groups indicate a run that can never make a batch.
            self._filtered.clear()
            self.finished.append(group)

    def readmit(self, group: FinishedGroup, *, compared: bool) -> None:
        """Settle a group of an earlier attempt. A group whose rewards come from a comparison waits again with all its
        members.

        The journal contains each member's reward before the comparison, so the comparison is repeated.

        Args:
            group: group with all members.
            compared: whether the environment compares the members.

        Raises:
            RoleError: see `settle`.
        """
        if not compared:
            self.settle(group)
            return
        self.ledger.back(group.number)
        self._unfinished[group.number] = Unfinished(group.dispatch_version, dict(enumerate(group.rollouts)))

    def _give_up(self, entry: DroppedEntry) -> None:
        if self._journal is not None:
            # Without waiting: a lost drop is harmless, because the next attempt plays or filters
            # the group again.
            self._journal.note(entry)
        self.drop(entry)

    def drop(self, entry: DroppedEntry) -> None:
        """Drop a dispatched group that is already in the journal."""
        self.ledger.drop(entry.group, entry.reason)
        self._dropped.append(Dropped(entry.group, entry.reason, entry.mean_reward, entry.next_group))
        self.sampler.drop(self.made + 1, entry.group, entry.mean_reward)

    def resume(self, found: Readmitted) -> None:
        """Resume waiting groups of an earlier attempt: only their missing members are played."""
        self._unfinished |= found.unfinished

    # ---- from finished to a batch

    def waits_for(self, step: int) -> bool:
        """Return whether the batch of `step` has to wait for an aged group in flight that would expire again.

        A slow group is therefore passed over once and then trained; it cannot starve.
        """
        return any(
            number in self.in_flight and self._is_old(self.in_flight[number].version, step + 1) for number in self._aged
        )

    def batch(self, groups: Sequence[FinishedGroup]) -> Batched:
        """Assign finished groups to the next step's batch. Groups that are too old for later batches wait again."""
        step, chosen = self.made + 1, {group.number for group in groups}
        self.finished = [group for group in self.finished if group.number not in chosen]
        self.ledger.accept(group.number for group in groups)
        tasks = tuple((group.number, self.sampler.draw(group.number).task) for group in groups)
        self.sampler.accept(step, {group.number: group.mean_reward for group in groups})
        # The next two lines compare the groups with the step after this one (`feeds`).
        self.advance(step)
        self.cancel_surplus()
        self._expire_groups(step + 1)
        dropped, self._dropped = tuple(self._dropped), []
        return Batched(step, tasks, dropped)

    def advance(self, step: int) -> None:
        """Record that the batch of `step` is made, from these groups or from a recording."""
        self.made = step
        self.snapshots[step] = Snapshot(step, self.ledger.state(), sampler=self.sampler.state())
        self._signal.notify()

    def _expire_groups(self, step: int) -> None:
        """Return groups that are too old for all batches from `step` on to the waiting state."""
        limit = self._config.algorithm.max_off_policy_steps
        self.finished, expired = split_by_age(self.finished, step=step, max_off_policy_steps=limit)
        for group in expired:
            self.ledger.dispatch_again(group.number, "age")
            self.ledger.remove("age", [rollout.loss_tokens for rollout in group.rollouts])
        self.cancel_too_old(step)

    def cancel_too_old(self, step: int) -> None:
        """Withdraw groups in flight that are too old for all batches from `step` on; their tasks are dispatched again."""
        for flight in self.in_flight.values():
            if not (flight.expired or flight.surplus) and self._is_old(flight.version, step):
                flight.expired = True
                self._withdraw_flight(flight)

    def cancel_surplus(self) -> None:
        """Withdraw the groups started for a batch that is made without them, if the run starts more groups than a step
        needs.

        Groups that were passed over because of their age stay, so that they do not starve.
        """
        for flight in self.in_flight.values() if self._config.surplus else ():
            if flight.number not in self._aged and not (flight.surplus or flight.expired or self.feeds(flight.version)):
                flight.surplus = True
                self._withdraw_flight(flight)

    def _withdraw_flight(self, flight: Flight) -> None:
        self.withdrawn.append(flight)
        self._signal.notify()
