"""Checkpoint verification shared by all ranks, each with its own files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.files import checkpoint_manifest
from rlrun.protocol.files.checkpoint_manifest import Manifest, ManifestError, describe_part
from rlrun.trainer.checkpoints.shared_check import SharedCheck, share_files

FILES = ("trainer/__0_0.distcp", "trainer/__1_0.distcp", "trainer/__1_1.distcp", "trainer/__2_0.distcp")
MORE = ("trainer/.metadata", "orchestrator/state.json")
RANKS = 3


class Meeting:
    """Exchange between ranks in threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.said = threading.Barrier(ranks, timeout=60), [None] * ranks


class Rank:
    """Rank in a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.world_size = meeting, rank, len(meeting.said)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def _all(self, word: Any) -> list[Any]:
        self._meeting.said[self.rank] = word
        self._meeting.barrier.wait()
        said = list(self._meeting.said)
        self._meeting.barrier.wait()
        return said

    def broadcast(self, document: object, *, root: int = 0) -> Any:
        return self._all(document)[root]

    def max_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        said = self._all(dict(values))
        return {name: max(one[name] for one in said) for name in values}


def together(lead: Callable[[SharedCheck], Any]) -> Any:
    """Return the result of rank 0, while the other ranks run `end`."""
    meeting = Meeting(RANKS)

    def work(rank: int) -> Any:
        check = SharedCheck(Rank(meeting, rank))
        found = lead(check) if rank == 0 else None
        check.finish_checks()
        return found

    with ThreadPoolExecutor(RANKS) as ranks:
        found, *_ = ranks.map(work, range(RANKS))
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for at, name in enumerate((*FILES, *MORE)):
        path = tmp_path / "step_00000002.a0001" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([at]) * 100)
    return tmp_path / "step_00000002.a0001"


def manifest_of(checkpoint: Path) -> Manifest:
    return Manifest(2, 1, RANKS, "hash", tuple(describe_part(checkpoint, checkpoint)), 1.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_file_is_assigned_to_one_rank(checkpoint: Path, world_size: int) -> None:
    files = manifest_of(checkpoint).files
    shares = [share_files(files, rank, world_size) for rank in range(world_size)]
    assert sorted(e.path for one in shares for e in one) == sorted((*FILES, *MORE))
    if world_size == RANKS:
        assert [e.path for e in shares[1]] == ["trainer/__1_0.distcp", "trainer/__1_1.distcp"]
        assert {e.path for e in shares[0]} == {FILES[0], *MORE}


def test_each_file_is_read_once_by_its_rank(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    checksum = checkpoint_manifest.file_checksum

    def noted(path: Path) -> int:
        read.append(str(path.relative_to(checkpoint)))
        return checksum(path)

    manifest = manifest_of(checkpoint)
    monkeypatch.setattr(checkpoint_manifest, "file_checksum", noted)
    together(lambda check: check.verify_checkpoint(checkpoint, manifest))
    assert sorted(read) == sorted((*FILES, *MORE))


def test_late_file_is_waited_for(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, checksum, manifest = {FILES[1], FILES[3]}, checkpoint_manifest.file_checksum, manifest_of(checkpoint)

    def seen(path: Path) -> int:
        if (name := str(path.relative_to(checkpoint))) in late:
            late.discard(name)
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return checksum(path)

    monkeypatch.setattr(checkpoint_manifest, "file_checksum", seen)
    together(lambda check: check.verify_checkpoint(checkpoint, manifest))
    assert not late


def test_unreadable_file_is_reported_with_its_rank(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checksum, manifest = checkpoint_manifest.file_checksum, manifest_of(checkpoint)

    def broken(path: Path) -> int:
        if path.name == "__2_0.distcp":
            raise OSError(5, "Input/output error", str(path))
        return checksum(path)

    def lead(check: SharedCheck) -> None:
        with pytest.raises(ManifestError, match=r"rank 2 cannot read .*__2_0.distcp: \[Errno 5\] Input/output error"):
            check.verify_checkpoint(checkpoint, manifest)

    monkeypatch.setattr(checkpoint_manifest, "file_checksum", broken)
    together(lead)


@pytest.mark.parametrize("name", [*FILES, *MORE])
def test_damage_found_by_any_rank_reaches_rank_0(checkpoint: Path, name: str) -> None:
    manifest = manifest_of(checkpoint)
    (checkpoint / name).write_bytes(b"x" * 100)

    def lead(check: SharedCheck) -> str:
        with pytest.raises(ManifestError, match=f"the checksum of {name} differs from the manifest") as found:
            check.verify_checkpoint(checkpoint, manifest)
        (checkpoint / name).unlink()
        with pytest.raises(ManifestError, match=f"{name} is missing"):
            check.verify_checkpoint(checkpoint, manifest)
        return str(found.value)

    assert together(lead).startswith("step_00000002.a0001: ")
