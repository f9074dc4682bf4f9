"""A run driven by hand: the real ledger, sampler, journal, batches and checkpoints, with events in any order."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from rlrun.config.models.learning import AdvantageConfig, FilterConfig
from rlrun.config.models.rollout import CurriculumConfig, PoolConfig
from rlrun.orchestrator import checkpoint
from rlrun.orchestrator.batches.assemble import assemble_batch, choose_groups
from rlrun.orchestrator.groups.filters import Rules, reason_to_drop
from rlrun.orchestrator.journal.frames import DroppedEntry, RolloutEntry, encode_entry
from rlrun.orchestrator.journal.journal_writer import SegmentWriter, remove_settled
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.recovery import Unfinished, read_journal, readmit_entries
from rlrun.orchestrator.progress.step_metrics import group_means
from rlrun.orchestrator.staleness import split_by_age, too_old
from rlrun.orchestrator.tasks.sampler import Sampler, Source
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout
from rlrun.protocol.files.attempts import Attempt, first_attempt, is_lost, next_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, Dropped, write_batch
from rlrun.protocol.files.checkpoint_manifest import Manifest, complete_checkpoints, write_manifest
from rlrun.protocol.files.paths import RunPaths

GROUP, BATCH, STEPS = 2, 4, 6
LABELS = ("plain", "pooled")
CURRICULUM = CurriculumConfig(easy=PoolConfig(threshold=0.9, fraction=0.25, train=False), hard=None)
RULES = {
    label: Rules(
        AdvantageConfig(name="rloo"), FilterConfig(zero_variance=True), max_tokens=8, vocabulary=100, curriculum=own
    )
    for label, own in zip(LABELS, (None, CURRICULUM), strict=True)
}

T = TypeVar("T")


def at_once(act: Callable[..., Generator[None, None, T]], *given: Any, **named: Any) -> T:
    """Return the result of work that needs no event loop."""
    steps = act(*given, **named)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@contextmanager
def without_flushes() -> Iterator[None]:
    """Replace flushes, because only the process is killed: the kernel keeps written data."""
    with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):
        yield


def a_rollout(versions: list[int], reward: float, *, text: str = "", serial: int = 0) -> Rollout:
    """Return one reply with one token per element of `versions`, after a prompt of two tokens of which the first is
    `serial`."""
    count = len(versions)
    sequence = Recorded(
        np.array([serial, *range(1, count + 2)], dtype=np.int32),
        np.array([False, False] + [True] * count),
        np.array([0.0, 0.0] + [-0.1 * (i + 1) for i in range(count)], np.float32),
        np.array([-1, -1, *versions], np.int32),
    )
    return Rollout(
        (sequence,), reward, {"score": reward / 3}, ({"role": "user", "content": text},), (text,), task_id="t"
    )


@dataclass
class Made:
    """A rollout that was generated and acknowledged."""

    serial: int
    attempt: Attempt
    dispatch_version: int
    newest_version: int


@dataclass
class World:
    """All attempts of one run.

    Attributes:
        made: every rollout that counted when it was finished, by group and member.
        trained: the batch on which each step was last trained.
    """

    root: Path
    depth: int
    limit: int
    segment_bytes: int = 1500
    serial: int = 0
    made: dict[tuple[int, int], list[Made]] = field(default_factory=dict)
    trained: dict[int, Batch] = field(default_factory=dict)
    attempt: Attempt = field(default_factory=lambda: first_attempt(world_size=1, config_hash="h"))

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.root)
        self._live()

    # ---- life of the orchestrator

    def _live(self) -> None:
        write_attempt(self.paths, self.attempt)
        base = checkpoint.base_snapshot(self.paths, self.attempt)
        self.ledger = Ledger.restore(base.ledger)
        sources = [Source("plain", 7, 1, GROUP), Source("pooled", 9, 2, GROUP, CURRICULUM)]
        self.sampler = Sampler(3, sources, BATCH, self.depth)
        assert self.sampler.restore(base.sampler, step=base.step, next_group=base.ledger.next_group)
        self.version = self.step = self.attempt.base_step
        """Numbers of trained steps and of steps with a batch."""
        self.buffer: list[FinishedGroup] = []
        self.flights: dict[int, Unfinished] = {}
        self.dropped: list[Dropped] = []
        self.snapshots: dict[int, checkpoint.Snapshot] = {}
        self.batches: dict[int, Batch] = {}
        number = self.attempt.attempt
        self.writer = SegmentWriter(self.paths, attempt=number, fingerprint="f", segment_bytes=self.segment_bytes)
        for batch in checkpoint.readmissible_batches(
            self.paths, self.attempt, self.ledger, max_off_policy_steps=self.limit
        ):
            self.sampler.readmit(batch, group_means(batch))
            self._keep(batch)
        found = read_journal(self.paths, self.attempt, fingerprint="f", settled=self.ledger.state().settled())
        self.back = at_once(
            readmit_entries,
            found,
            is_old=partial(too_old, step=self.step + 1, max_off_policy_steps=self.limit),
            ledger=self.ledger,
            sampler=self.sampler,
            environments=[(label, GROUP) for label in LABELS],
            finish=self._settle,
            drop=self._drop,
        )
        self.unfinished = dict(self.back.unfinished)

    def crash(self, torn: float) -> None:
        """Kill everything in the middle of a write of which this share reached the disk, and start the next attempt."""
        if self.flights:
            group, flight = min(self.flights.items())
            member = min(set(range(GROUP)) - set(flight.members))
            data = encode_entry(self._entry(group, member))[:-1]
            newest = max(self.paths.journal_on_disk(), default=None)
            if newest is not None and newest.attempt == self.attempt.attempt:
                with newest.path.open("ab") as file:
                    file.write(data[: int(torn * len(data))])
        self.writer.close()
        complete = self.attempt.owned(complete_checkpoints(self.paths))
        number = self.attempt.attempt + 1
        if complete:
            base = complete[-1].step
            self.attempt = next_attempt(self.attempt, base, attempt=number, world_size=1, config_hash="h")
        else:
            self.attempt = first_attempt(world_size=1, config_hash="h", attempt=number)
        self._live()

    # ---- possible events

    def dispatch(self) -> bool:
        """Start a group, if the limit of the pipeline's depth allows one."""
        running = GROUP * (len(self.flights) + len(self.buffer))
        if (self.depth + self.version + 1) * BATCH - (self.step * BATCH + running) <= 0:
            return False
        group = self.ledger.take()
        self.sampler.draw(group)
        kept = self.unfinished.pop(group, None)
        fresh = kept is not None and not too_old(kept.version, step=self.step + 1, max_off_policy_steps=self.limit)
        self.flights[group] = kept if kept is not None and fresh else Unfinished(self.version, {})
        return True

    def finish(self, choice: int) -> bool:
        """Finish a member of a group in flight durably."""
        if not self.flights:
            return False
        group = sorted(self.flights)[choice % len(self.flights)]
        flight = self.flights[group]
        member = sorted(set(range(GROUP)) - set(flight.members))[choice % (GROUP - len(flight.members))]
        self.serial += 1
        entry = self._entry(group, member)
        self._check_needed(group, member)
        self.writer.write([entry])
        known = self.made.setdefault((group, member), [])
        known.append(Made(self.serial, self.attempt, entry.dispatch_version, entry.newest_version))
        members = {**flight.members, member: entry.rollout}
        self.flights[group] = Unfinished(flight.version, members)
        if len(members) == GROUP:
            del self.flights[group]
            rollouts = tuple(rollout for _, rollout in sorted(members.items()))
            self._settle(FinishedGroup(group, entry.environment, "t", flight.version, 1.0, rollouts))
        return True

    def pack(self) -> bool:
        """Make the next batch."""
        usable, _ = split_by_age(self.buffer, step=self.step + 1, max_off_policy_steps=self.limit)
        groups = choose_groups(usable, BATCH)
        if groups is None or self.step == STEPS:
            return False
        step = self.step + 1
        self.buffer = [group for group in self.buffer if group not in groups]
        self.ledger.accept(group.number for group in groups)
        tasks = tuple((group.number, self.sampler.draw(group.number).task) for group in groups)
        self.sampler.accept(step, {group.number: group.mean_reward for group in groups})
        batch = assemble_batch(groups, step=step, attempt=self.attempt.attempt, rules=RULES)
        self._keep(Batch(step, batch.attempt, batch.samples, dropped=tuple(self.dropped), tasks=tasks))
        self.dropped = []
        self.buffer, expired = split_by_age(self.buffer, step=step + 1, max_off_policy_steps=self.limit)
        old = [n for n, f in self.flights.items() if too_old(f.version, step=step + 1, max_off_policy_steps=self.limit)]
        for number in [*(group.number for group in expired), *old]:
            self.flights.pop(number, None)
            self.ledger.dispatch_again(number, "age")
        return True

    def train(self) -> bool:
        """Let the trainer take the next batch."""
        if self.version == self.step:
            return False
        self.version += 1
        batch = self.trained[self.version] = self.batches[self.version]
        for sample in batch.samples:
            [made] = [m for m in self.made[sample.group, sample.rollout] if m.serial == sample.input_ids[0]]
            assert not is_lost(made.newest_version, made.attempt, self.attempt), "a lost version is trained on"
            assert not too_old(made.dispatch_version, step=batch.step, max_off_policy_steps=self.limit)
        return True

    def save(self) -> bool:
        """Complete a checkpoint of the last trained step, and delete the journal's covered files."""
        if self.version == self.attempt.base_step or self.version not in self.snapshots:
            return False
        step, number = self.version, self.attempt.attempt
        folder = self.paths.checkpoint(step, number)
        checkpoint.write_snapshot(folder, self.snapshots.pop(step))
        write_manifest(folder, Manifest(step, number, 1, "h", (), 0.0))
        covering = checkpoint.newest_complete(self.paths, self.attempt)
        assert covering is not None
        remove_settled(self.writer.rotate(), covering.ledger.settled())
        return True

    def to_the_end(self, choose_one: Callable[[], int] = lambda: 0) -> None:
        """Do all possible events until all steps are trained."""
        for _ in range(2000):
            if self.version == STEPS:
                return
            _ = self.train() or self.pack() or self.finish(choose_one()) or self.dispatch()
        raise AssertionError(f"the run stands still at step {self.step}")

    # ---- details

    def _entry(self, group: int, member: int) -> RolloutEntry:
        draw = self.sampler.draw(group)
        label = LABELS[draw.environment]
        about = zlib.crc32(f"{label}/{draw.task}".encode())
        reward = float((about >> 8) % 4 == 0) if about % 3 == 0 else float((about + member) % 2)
        first = self.flights[group].version if group in self.flights else self.version
        versions = sorted([max(first, min(self.version, first + 1)), self.version])
        return RolloutEntry(
            group, member, label, draw.task, first, 1.0, a_rollout(versions, reward, serial=self.serial)
        )

    def _settle(self, group: FinishedGroup) -> None:
        if (reason := reason_to_drop(group, RULES[group.environment])) is None:
            self.buffer.append(group)
            return
        newest = max(int(sequence.versions.max()) for rollout in group.rollouts for sequence in rollout.sequences)
        entry = DroppedEntry(group.number, reason, group.mean_reward, self.ledger.next_group, newest)
        self.writer.write([entry])
        self._drop(entry)

    def _drop(self, entry: DroppedEntry) -> None:
        self.ledger.drop(entry.group, entry.reason)
        self.dropped.append(Dropped(entry.group, entry.reason, entry.mean_reward, entry.next_group))
        self.sampler.drop(self.step + 1, entry.group, entry.mean_reward)

    def _keep(self, batch: Batch) -> None:
        write_batch(self.paths.batch(batch.step, self.attempt.attempt), batch)
        self.step = batch.step
        self.batches[batch.step] = batch
        self.snapshots[batch.step] = checkpoint.Snapshot(batch.step, self.ledger.state(), sampler=self.sampler.state())

    def _check_needed(self, group: int, member: int) -> None:
        """Check that a rollout that counted before is generated again only if it can no longer be trained on."""
        for before in self.made.get((group, member), []):
            old = too_old(before.dispatch_version, step=self.step + 1, max_off_policy_steps=self.limit)
            lost = is_lost(before.newest_version, before.attempt, self.attempt)
            assert old or lost, f"group {group}, member {member} is generated again in {self.attempt.attempt}"
