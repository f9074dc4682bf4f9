"""Staging of versions in shared memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlrun.inference.weights import receive as module
from rlrun.inference.weights.preflight import tensor_shapes
from rlrun.inference.weights.receive import NoRoomError, Staging, file_name, make_file
from rlrun.protocol.messages.buckets import TensorInfo, plan_buckets

BUCKETS = plan_buckets([TensorInfo(name=name, dtype="float32", shape=[4]) for name in "ab"], bucket_bytes=16)


def fill(folder: Path) -> None:
    for bucket in BUCKETS:
        memory, start = make_file(folder / file_name(bucket, len(BUCKETS)), bucket)
        memory[start:] = bytes(bucket.size)


def test_staged_version_is_a_loadable_folder(tmp_path: Path) -> None:
    staging = Staging(tmp_path)
    folder = staging.open(1, BUCKETS)
    fill(folder)
    assert tensor_shapes(folder) == {"a": (4,), "b": (4,)}
    other = staging.open(2, BUCKETS)
    assert not folder.exists(), "one version at a time"
    staging.drop_all()
    assert not other.exists()
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_staging_removes_folders_of_dead_processes_only(tmp_path: Path) -> None:
    lives, gone = Staging(tmp_path), Staging(tmp_path)
    kept = lives.open(1, BUCKETS)
    left = gone.open(1, BUCKETS)
    lock = gone._lock
    assert lock is not None
    module.os.close(lock)  # as its process ends
    Staging(tmp_path).open(2, BUCKETS)
    assert kept.exists()
    assert not left.parent.exists()


def test_oversized_version_is_refused_with_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(NoRoomError, match=r"increase inference\.sharedMemory"):
        Staging(tmp_path).open(1, BUCKETS)


def test_exhausted_memory_raises_error_instead_of_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    folder = Staging(tmp_path).open(1, BUCKETS)
    with pytest.raises(NoRoomError, match="No space left on device"):
        fill(folder)
