"""Routes of rollouts in the journal: they survive a restart, and a damaged file of routes costs only routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from orch_journal_world import World, a_rollout, without_flushes

from rlrun.orchestrator.journal.frames import RolloutEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import SegmentWriter, remove_settled
from rlrun.orchestrator.journal.recovery import _read_segment
from rlrun.orchestrator.journal.route_frames import read_route_file
from rlrun.protocol.files.batch import read_batch
from rlrun.protocol.files.paths import JournalSegment, RunPaths
from rlrun.protocol.files.routes import Routes


def routed_entry(group: int, member: int = 0) -> RolloutEntry:
    """Return a rollout of two sequences; only the first one has routes."""
    rollout = a_rollout([3, 4], 0.5)
    (first,) = rollout.sequences
    tokens = len(first.input_ids)
    routes = np.arange(tokens * 6).reshape(tokens, 3, 2).astype(np.uint8) + np.uint8(group)
    return RolloutEntry(
        group, member, "e", 5, 3, 0.7, replace(rollout, sequences=(replace(first, routes=routes), first))
    )


def write_entries(folder: Path, *entries: RolloutEntry) -> JournalSegment:
    writer = SegmentWriter(RunPaths(folder), attempt=1, fingerprint="f")
    writer.write(entries)
    writer.close()
    (segment,) = RunPaths(folder).journal_on_disk()
    return segment


def test_recovered_rollouts_have_their_routes(tmp_path: Path) -> None:
    written = [routed_entry(1), routed_entry(2, 3)]
    content = _read_segment(write_entries(tmp_path, *written))
    assert content is not None
    assert len(content.entries) == len(written)
    for found, entry in zip(content.entries, written, strict=True):
        assert isinstance(found, RolloutEntry)
        for one, other in zip(found.rollout.sequences, entry.rollout.sequences, strict=True):
            if other.routes is None:
                assert one.routes is None
                continue
            assert one.routes is not None
            assert one.routes.dtype == other.routes.dtype
            assert np.array_equal(one.routes, other.routes)


def test_rollouts_without_routes_have_no_file_of_routes(tmp_path: Path) -> None:
    segment = write_entries(tmp_path, RolloutEntry(1, 0, "e", 5, 3, 0.7, a_rollout([3], 0.5)))
    assert not segment.routes.exists()


@pytest.mark.parametrize("damage", ["torn", "bit", "missing"])
def test_damaged_routes_cost_only_routes(damage: str, tmp_path: Path) -> None:
    segment = write_entries(tmp_path, routed_entry(1), routed_entry(2))
    whole = segment.routes.read_bytes()
    if damage == "missing":
        segment.routes.unlink()
    else:
        changed = whole[:-1] if damage == "torn" else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        segment.routes.write_bytes(changed)
    known = set() if damage == "missing" else {(1, 0)}
    assert set(read_route_file(segment.routes)) == known
    content = _read_segment(segment)
    assert content is not None
    with_routes = {
        (one.group, one.member)
        for one in content.entries
        if isinstance(one, RolloutEntry) and one.rollout.sequences[0].routes is not None
    }
    assert with_routes == known
    assert len(content.entries) == len(read_segment(segment.path).entries) == 2


def test_routes_of_other_lengths_are_left_out(tmp_path: Path) -> None:
    """A file of routes that belongs to another journal file must not shift the experts of tokens."""
    first = write_entries(tmp_path / "a", routed_entry(1))
    (sequence,) = a_rollout([9, 9, 9], 0.5).sequences
    entry = routed_entry(1)
    longer = replace(entry, rollout=replace(entry.rollout, sequences=(sequence, sequence)))
    second = write_entries(tmp_path / "b", longer)
    second.routes.write_bytes(first.routes.read_bytes())
    content = _read_segment(second)
    assert content is not None
    (found,) = content.entries
    assert isinstance(found, RolloutEntry)
    assert all(sequence.routes is None for sequence in found.rollout.sequences)


def test_removed_journal_file_takes_its_routes_with_it(tmp_path: Path) -> None:
    segment = write_entries(tmp_path, routed_entry(1))
    assert segment.routes.exists()
    assert remove_settled([segment], lambda group: False) == []
    assert segment.routes.exists()
    assert remove_settled([segment], lambda group: True) == [segment]
    assert list(segment.path.parent.iterdir()) == []


class RoutedWorld(World):
    """Run whose rollouts have routes that name their serial number."""

    def _entry(self, group: int, member: int) -> RolloutEntry:
        entry = super()._entry(group, member)
        (sequence,) = entry.rollout.sequences
        routed = replace(sequence, routes=routes_of(sequence.input_ids))
        return replace(entry, rollout=replace(entry.rollout, sequences=(routed,)))


def routes_of(input_ids: npt.NDArray[np.int32]) -> Routes:
    """Return routes of three layers, which differ for each serial number (the first token) and position."""
    tokens = len(input_ids)
    first = (input_ids[0] + np.arange(tokens)) % 100
    column: Routes = np.stack([np.stack([first + layer, first + layer + 100], -1) for layer in range(3)], 1).astype(
        np.uint8
    )
    return column


def test_recovered_rollouts_are_in_batches_with_their_routes(tmp_path: Path) -> None:
    with without_flushes():
        world = RoutedWorld(tmp_path, depth=2, limit=4)
        for events in (9, 14, 11):
            for number in range(events):
                _ = world.finish(number) or world.dispatch() or world.train() or world.pack()
            world.crash(0.5)
        assert world.back.rollouts > 0
        world.to_the_end()
    recovered = 0
    for step, batch in world.trained.items():
        found = read_batch(world.paths.batch(step, batch.attempt))
        for sample in found.samples:
            assert sample.routes is not None
            assert np.array_equal(sample.routes, routes_of(sample.input_ids))
            (made,) = [m for m in world.made[sample.group, sample.rollout] if m.serial == sample.input_ids[0]]
            recovered += made.attempt.attempt < found.attempt
    assert recovered > 0
