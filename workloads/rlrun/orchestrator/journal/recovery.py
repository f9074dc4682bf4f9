"""Recovery from the journal after a restart: the usable finished rollouts of earlier attempts, in their order.

A record counts if its group is not settled, each of its tokens was sampled by a version of the current lineage, it is
fresh enough, and the sampler gives its group the same task. Records are processed in the order of writing, so groups
are completed, dropped and drawn in the order of the killed attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from loguru import logger

from rlrun.environments.bounds import MAX_REWARD, BoundsError, bounded_number, plain_score
from rlrun.environments.protocol import Score
from rlrun.orchestrator.journal.frames import Content, DroppedEntry, Entry, RolloutEntry, read_segment
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.route_frames import attach_routes, read_route_file
from rlrun.orchestrator.tasks.sampler import Sampler
from rlrun.orchestrator.types import FinishedGroup, Rollout
from rlrun.protocol.files.attempts import Attempt, earlier_attempts, is_lost
from rlrun.protocol.files.paths import JournalSegment, RunPaths

Member = tuple[int, int]
"""Group number and index in the group."""


@dataclass
class Found:
    """Records of unsettled groups in the journal."""

    entries: list[Entry] = field(default_factory=list)
    """Entries that may count, in the order of writing."""
    refused: dict[Member, str] = field(default_factory=dict)
    """Rollouts with an unusable record, and the reason."""
    uncounted: set[Member] = field(default_factory=set)
    """Rollouts that no earlier restart has reported, because their records are younger than the checkpoint's attempt.
    """

    def add(self, entry: Entry, reason: str | None, *, uncounted: bool) -> None:
        """Add an entry.

        Args:
            entry: entry of an unsettled group.
            reason: reason why it does not count, or None.
            uncounted: whether no earlier restart has reported it.
        """
        if reason is None:
            self.entries.append(entry)
        if isinstance(entry, RolloutEntry):
            self.note((entry.group, entry.member), reason, uncounted=uncounted)

    def note(self, member: Member, reason: str | None, *, uncounted: bool) -> None:
        """Record that a rollout has a record, readable or not; arguments as in `add`."""
        if reason is not None:
            self.refused[member] = reason
        if uncounted:
            self.uncounted.add(member)


@dataclass(frozen=True)
class Unfinished:
    """Group with some finished members."""

    version: int
    """Oldest dispatch version of these members."""
    members: Mapping[int, Rollout]


@dataclass
class Readmitted:
    """Result of the recovery."""

    groups: int = 0
    """Number of finished groups."""
    rollouts: int = 0
    """Number of rollouts that are not generated again, including those of unfinished groups."""
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """Unusable rollouts by reason: a lost `version`, above the `age` limit, another `task`, another `config`, another
    `format` of the journal, or a `reward` that cannot be trained on.
    """

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.refused.items()))
        return (
            f"reused {self.rollouts} finished rollouts of earlier attempts ({self.groups} complete groups, parts of "
            f"{len(self.unfinished)} more), {self.refused.total()} are unusable" + (f" ({reasons})" if reasons else "")
        )


def read_journal(paths: RunPaths, attempt: Attempt, *, fingerprint: str, settled: Callable[[int], bool]) -> Found:
    """Read the records of unsettled groups of all earlier attempts.

    Args:
        paths: paths of the run.
        attempt: current attempt.
        fingerprint: fingerprint of the settings of its rollouts.
        settled: whether a group is in a batch or dropped.
    """
    writers, found, base = earlier_attempts(paths, attempt, log=logger.warning), Found(), attempt.base_attempt or 0
    for segment in paths.journal_on_disk():
        writer = writers.get(segment.attempt)
        # Versions can be judged only with the attempt that sampled them. Files of unknown attempts
        # are skipped.
        content = None if writer is None else _read_segment(segment)
        if writer is None or content is None:
            continue
        # The counters of the base checkpoint already contain the records that earlier restarts have
        # reported.
        counted = segment.attempt >= base
        for record in content.foreign:
            if record.member >= 0 and not settled(record.group):
                found.note((record.group, record.member), "format", uncounted=counted)
        # Rollouts of other settings (model, sampling, template, environment) do not belong to the
        # batches of this attempt.
        foreign = content.head is None or content.head.fingerprint != fingerprint
        for entry in content.entries:
            if not settled(entry.group):
                reason = "config" if foreign else _of_no_use(entry, writer, attempt)
                found.add(entry, reason, uncounted=counted)
    return found


def _read_segment(segment: JournalSegment) -> Content | None:
    """Read a journal file, or return None if it is unreadable. Logs unusable records."""
    try:
        content = read_segment(segment.path)
    except OSError as error:
        logger.warning(f"cannot read the journal file {segment.path}: {error}")
        return None
    if content.torn:
        logger.info(f"the journal file {segment.path.name} ends with an incomplete record ({content.torn} bytes)")
    if content.foreign:
        logger.warning(
            f"{len(content.foreign)} records in the journal file {segment.path.name} come from another version of rlrun "
            f"({content.foreign[0].reason}); their rollouts are generated again"
        )
    try:
        content.entries = attach_routes(content.entries, read_route_file(segment.routes))
    except OSError as error:
        logger.warning(f"cannot read {segment.routes}: {error}; its rollouts are routed natively")
    return content


def _of_no_use(entry: Entry, writer: Attempt, attempt: Attempt) -> str | None:
    """Return the reason why an attempt cannot use an entry, or None.

    Reasons are a reward that float32 cannot hold, which earlier releases accepted, and a lost version.
    """
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
    """Readmit the records in their order. Yields between two records, because there may be many thousands.

    Args:
        found: result of `read_journal`.
        is_old: whether a policy version is too old for the next batch.
        ledger: ledger with the earlier batches. Afterwards it contains each complete or dropped group as dispatched.
        sampler: sampler with the earlier batches; updated in the same way.
        environments: label and group size of each environment, in the order of the sampler.
        finish: callback with each complete group.
        drop: callback with each dropped group.
        changed: labels of environments whose tasks differ from those of the earlier attempts.
    """
    newest, given_up, old = _latest_records(found.entries, is_old)
    refused = found.refused | dict.fromkeys(old, "age")
    made, used = Readmitted(), set[Member]()
    waiting: dict[int, dict[int, RolloutEntry]] = {}
    # One pass in the order of writing, so that the sampler draws the same tasks as the killed attempt.
    for entry in found.entries:
        yield
        if isinstance(entry, DroppedEntry):
            if given_up.get(entry.group) is entry:
                _claim_dropped_group(entry, ledger, sampler)
                drop(entry)
            continue
        member = entry.group, entry.member
        if entry.group in given_up:
            used.add(member)
            continue
        if newest.get(member) is not entry:  # only the last fresh record of a rollout counts
            continue
        ledger.reach(entry.group + 1)
        # The sampler decides the task of a group again. Another task than in the record means that
        # data or settings have changed.
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


def _claim_dropped_group(entry: DroppedEntry, ledger: Ledger, sampler: Sampler) -> None:
    """Mark a dropped group as dispatched, at the same point of the draws as in the attempt that dropped it."""
    # Groups that were drawn before the drop are drawn before it now. A drop changes a curriculum's
    # pools, and later draws depend on them.
    ledger.reach(entry.next_group)
    sampler.draw_before(entry.next_group)
    ledger.claim(entry.group)


def _latest_records(
    entries: Sequence[Entry], is_old: Callable[[int], bool]
) -> tuple[dict[Member, RolloutEntry], dict[int, DroppedEntry], set[Member]]:
    """Return the last fresh record of each rollout, the last record of each finally dropped group, and rollouts with a
    record that is too old.

    Args:
        entries: entries in the order of writing.
        is_old: whether a dispatch version is too old.
    """
    # A rollout can have several records: an attempt plays again what it could not use, and a failed
    # flush is written again.
    newest: dict[Member, RolloutEntry] = {}
    given_up: dict[int, DroppedEntry] = {}
    old: set[Member] = set()
    for entry in entries:
        if isinstance(entry, DroppedEntry):
            given_up[entry.group] = entry
            continue
        given_up.pop(entry.group, None)  # it was played again by an attempt that did not inherit the drop
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
