"""Routes of rollouts in the journal: they survive a restart, and a damaged file of routes costs only routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from orch_journal_world import a_rollout

from rlrun.orchestrator.journal.frames import RolloutEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import SegmentWriter, remove_settled
from rlrun.orchestrator.journal.recovery import _read_segment
from rlrun.orchestrator.journal.route_frames import read_route_file
from rlrun.protocol.files.paths import JournalSegment, RunPaths


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
