"""Recovery from the journal after a restart: the finished rollouts of earlier attempts that count, and their order.

A record counts if its group is not settled yet, each of its tokens was sampled by a version that the present lineage has, it is fresh
enough, and the sampler still gives its group the same task. Records are gone through in the order in which they were written: groups
are complete, given up and drawn in the order of the attempt that was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from loguru import logger

from rlrun.environments.bounds import MAX_REWARD, BoundsError, bounded_number, plain_score
from rlrun.environments.protocol import Score
from rlrun.orchestrator.journal.format import Content, DroppedEntry, Entry, RolloutEntry, read_segment
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.tasks.sampler import Sampler
from rlrun.orchestrator.types import FinishedGroup, Rollout
from rlrun.protocol.files.attempts import Attempt, earlier_attempts, is_lost
from rlrun.protocol.files.paths import JournalSegment, RunPaths

Member = tuple[int, int]
"""Group and index within it."""


@dataclass
class Found:
    """Groups on the disk that are not settled."""

    entries: list[Entry] = field(default_factory=list)
    """Entries that may count, in the order in which they were written."""
    refused: dict[Member, str] = field(default_factory=dict)
    """Rollouts with a record that does not count, and why."""
    uncounted: set[Member] = field(default_factory=set)
    """Rollouts that no earlier restart has reported: their records are younger than the checkpoint's attempt."""

    def add(self, entry: Entry, reason: str | None, *, uncounted: bool) -> None:
        """Take an entry in.

        Args:
            entry: of a group that is not settled.
            reason: why it does not count; None: it may.
            uncounted: no earlier restart has reported it.
        """
        if reason is None:
            self.entries.append(entry)
        if isinstance(entry, RolloutEntry):
            self.note((entry.group, entry.member), reason, uncounted=uncounted)

    def note(self, member: Member, reason: str | None, *, uncounted: bool) -> None:
        """Note a rollout of which there is a record, whether or not that can be read; arguments as in `add`."""
        if reason is not None:
            self.refused[member] = reason
        if uncounted:
            self.uncounted.add(member)


@dataclass(frozen=True)
class Unfinished:
    """A group of which some members are finished."""

    version: int
    """Oldest dispatch version of these members."""
    members: Mapping[int, Rollout]


@dataclass
class Readmitted:
    """Result of the recovery."""

    groups: int = 0
    """Finished groups."""
    rollouts: int = 0
    """Rollouts that are not generated again, those of unfinished groups too."""
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """Rollouts that were generated in vain: of a lost `version`, above the bound on `age`, of another `task`, another `config` or
    another `format` of the journal, or with a `reward` that cannot be trained on."""

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.refused.items()))
        return (
            f"{self.rollouts} finished rollouts of the attempts before count again ({self.groups} whole groups, parts of "
            f"{len(self.unfinished)} more), {self.refused.total()} are of no use" + (f" ({reasons})" if reasons else "")
        )


def read_journal(paths: RunPaths, attempt: Attempt, *, fingerprint: str, settled: Callable[[int], bool]) -> Found:
    """The records of all earlier attempts that are of groups which are not settled.

    Args:
        paths: of the run.
        attempt: the present one.
        fingerprint: of what its own rollouts are made with.
        settled: whether a group is in a batch or given up.
    """
    writers, found, base = earlier_attempts(paths, attempt, log=logger.warning), Found(), attempt.base_attempt or 0
    for segment in paths.journal_on_disk():
        writer = writers.get(segment.attempt)
        content = None if writer is None else _read_segment(segment)
        if writer is None or content is None:
            continue
        counted = segment.attempt >= base
        for record in content.foreign:
            if record.member >= 0 and not settled(record.group):
                found.note((record.group, record.member), "format", uncounted=counted)
        foreign = content.head is None or content.head.fingerprint != fingerprint
        for entry in content.entries:
            if not settled(entry.group):
                reason = "config" if foreign else _of_no_use(entry, writer, attempt)
                found.add(entry, reason, uncounted=counted)
    return found


def _read_segment(segment: JournalSegment) -> Content | None:
    """Content of a file of the journal; None: it cannot be read. Logs what is of no use in it."""
    try:
        content = read_segment(segment.path)
    except OSError as error:
        logger.warning(f"{segment.path} of the journal cannot be read: {error}")
        return None
    if content.torn:
        logger.info(f"{segment.path.name} of the journal ends with a record that is not whole ({content.torn} bytes)")
    if content.foreign:
        logger.warning(
            f"{len(content.foreign)} records in {segment.path.name} of the journal are of another version of rlrun "
            f"({content.foreign[0].reason}); these rollouts are generated again"
        )
    return content


def _of_no_use(entry: Entry, writer: Attempt, attempt: Attempt) -> str | None:
    """Reason why an attempt cannot use an entry: earlier releases took rewards that float32 cannot hold, or a version is lost."""
    try:
        if isinstance(entry, RolloutEntry):
            plain_score(Score(entry.rollout.reward, dict(entry.rollout.metrics)))
        elif entry.mean_reward is not None:
            bounded_number(entry.mean_reward, "mean reward", MAX_REWARD)
    except BoundsError:
        return "reward"
    return "version" if is_lost(entry.newest_version, writer, attempt) else None


def readmit_entries(
    found: Found,
    *,
    is_old: Callable[[int], bool],
    ledger: Ledger,
    sampler: Sampler,
    environments: Sequence[tuple[str, int]],
    finish: Callable[[FinishedGroup], None],
    drop: Callable[[DroppedEntry], None],
    changed: Collection[str] = (),
) -> Generator[None, None, Readmitted]:
    """Let what was found count again, in the order in which it did; yields between two records, of which there may be many thousands.

    Args:
        found: what `read_journal` gave.
        is_old: whether what was sampled with a policy version is too old for the batch that is made next.
        ledger: knows of the batches before that one; a group that is whole or given up is dispatched by its account afterwards.
        sampler: likewise.
        environments: label and group size, in the order of the sampler.
        finish: gets each group that is whole.
        drop: gets each group that was given up.
        changed: labels of environments whose tasks are not those of the attempts before.
    """
    newest, given_up, old = _latest_records(found.entries, is_old)
    refused = found.refused | dict.fromkeys(old, "age")
    made, used = Readmitted(), set[Member]()
    waiting: dict[int, dict[int, RolloutEntry]] = {}
    for entry in found.entries:
        yield
        if isinstance(entry, DroppedEntry):
            if given_up.get(entry.group) is entry:
                ledger.reach(entry.next_group)
                sampler.draw_before(entry.next_group)
                ledger.claim(entry.group)
                drop(entry)
            continue
        member = entry.group, entry.member
        if entry.group in given_up:
            used.add(member)
            continue
        if newest.get(member) is not entry:
            continue
        ledger.reach(entry.group + 1)
        draw = sampler.draw(entry.group)
        label, size = environments[draw.environment]
        if (label, draw.task) != (entry.environment, entry.task) or entry.member >= size or label in changed:
            refused[member] = "task"
            continue
        used.add(member)
        made.rollouts += 1
        members = waiting.setdefault(entry.group, {})
        members[entry.member] = entry
        if len(members) == size:
            made.groups += 1
            ledger.claim(entry.group)
            finish(_finished_group(waiting.pop(entry.group)))
    made.unfinished.update((group, _unfinished_group(members)) for group, members in waiting.items())
    made.refused.update(refused[member] for member in refused.keys() - used if member in found.uncounted)
    return made


def _latest_records(
    entries: Sequence[Entry], is_old: Callable[[int], bool]
) -> tuple[dict[Member, RolloutEntry], dict[int, DroppedEntry], set[Member]]:
    """The last fresh record of each rollout, that of each group that was given up in the end, and rollouts with a record that is too old.

    Args:
        entries: in the order in which they were written.
        is_old: whether a dispatch version is.
    """
    newest: dict[Member, RolloutEntry] = {}
    given_up: dict[int, DroppedEntry] = {}
    old: set[Member] = set()
    for entry in entries:
        if isinstance(entry, DroppedEntry):
            given_up[entry.group] = entry
            continue
        given_up.pop(entry.group, None)  # it was played again: the attempt that gave it up was not that one's past
        member = entry.group, entry.member
        if is_old(entry.dispatch_version):
            old.add(member)
        else:
            newest[member] = entry
    return newest, given_up, old


def _unfinished_group(members: Mapping[int, RolloutEntry]) -> Unfinished:
    version = min(entry.dispatch_version for entry in members.values())
    return Unfinished(version, {member: entry.rollout for member, entry in members.items()})


def _finished_group(members: Mapping[int, RolloutEntry]) -> FinishedGroup:
    entries = [entry for _, entry in sorted(members.items())]
    return FinishedGroup(
        number=entries[0].group,
        environment=entries[0].environment,
        task_id=entries[0].rollout.task_id,
        dispatch_version=min(entry.dispatch_version for entry in entries),
        temperature=entries[0].temperature,
        rollouts=tuple(entry.rollout for entry in entries),
    )
