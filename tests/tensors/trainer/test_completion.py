"""Manifests of checkpoints, written last when both parts are complete."""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path

import pytest

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.protocol.files.attempts import first_attempt
from rlrun.protocol.files.checkpoint_manifest import (
    Manifest,
    complete_checkpoints,
    describe_part,
    read_manifest,
    verify_files,
)
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Trouble, Volume
from rlrun.trainer.checkpoints import completion
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.unsaved import Refused, Retry


class Run:
    """Completer with its reported steps."""

    def __init__(self, root: Path, *, with_orchestrator: bool = True, keep_last: int = 3) -> None:
        self.paths = RunPaths(root)
        self.told: queue.Queue[int] = queue.Queue()
        self.completer = Completer(
            self.paths,
            first_attempt(world_size=2, config_hash="h"),
            CheckpointConfig(keep_last=keep_last),
            with_orchestrator=with_orchestrator,
            on_complete=lambda step, path: self.told.put(step),
            volume=Volume(root),
        )

    def part(self, step: int, part: str) -> Path:
        path = self.paths.checkpoint(step, 1)
        (path / part).mkdir(parents=True)
        (path / part / "data").write_text(f"{part} {step}")
        return path

    def saved(self, step: int, path: Path) -> None:
        self.completer.saved(step, path, describe_part(path, path / "trainer"))

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in complete_checkpoints(self.paths)]


def test_checkpoint_is_complete_with_both_parts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    run.saved(2, path)
    other = run.part(4, "trainer")
    run.part(4, "orchestrator")
    run.completer.agreed(4)  # may arrive before the shards' checksums are known
    run.saved(4, other)
    assert run.told.get(timeout=60) == 4
    assert run.completer.close(60)
    assert run.steps() == [4]
    manifest = read_manifest(other)
    verify_files(other, manifest)
    assert {entry.path for entry in manifest.files} == {"trainer/data", "orchestrator/data"}
    assert (manifest.world_size, manifest.config_hash) == (2, "h")
    assert manifest.lineage == first_attempt(world_size=2, config_hash="h").lineage
    assert run.completer.failure is None


def test_old_checkpoints_are_deleted_after_the_new_one(tmp_path: Path) -> None:
    run = Run(tmp_path, with_orchestrator=False, keep_last=2)
    for step in (2, 4, 6):
        run.saved(step, run.part(step, "trainer"))
    assert run.completer.close(60)
    assert run.steps() == [4, 6]
    assert [artifact.step for artifact in run.paths.checkpoints_on_disk()] == [4, 6]


def test_late_agreement_on_deleted_checkpoint_is_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saved(2, run.part(2, "trainer"))
    path = run.part(4, "trainer")
    run.part(4, "orchestrator")
    run.saved(4, path)
    run.completer.agreed(4)
    run.completer.agreed(2)
    assert run.completer.close(60)
    assert run.steps() == [4]
    assert run.completer.failure is None


def test_completion_failure_is_kept_for_the_loop(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    run.saved(2, path)
    run.completer.agreed(2)  # but the orchestrator's part does not exist
    assert run.completer.close(60)
    assert run.completer.failure is not None
    assert "orchestrator contains no files" in str(run.completer.failure)
    assert run.steps() == []


def test_refused_manifest_is_written_when_the_volume_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = completion.write_manifest, threading.Event()
    full = [True]

    def write(path: Path, manifest: Manifest) -> None:
        if full[0]:
            refused.set()
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, manifest)

    monkeypatch.setattr(completion, "write_manifest", write)
    run = Run(tmp_path, with_orchestrator=False)
    run.saved(2, run.part(2, "trainer"))
    assert refused.wait(60)
    assert run.steps() == []
    assert run.completer.failure is None
    full[0] = False
    assert run.told.get(timeout=60) == 2
    assert run.completer.close(60)
    assert run.steps() == [2]


def test_shards_with_failed_flush_are_removed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, with_orchestrator=False)
    path = run.part(2, "trainer")
    with monkeypatch.context() as patch:

        def refuse(folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(completion, "flush_trainer_part", refuse)
        run.saved(2, path)
        assert not run.completer.wait_for(2, worth=lambda: True)
    refused = run.completer.refused
    assert refused is not None
    assert (refused.step, refused.trouble.reason) == (2, "StorageFull")
    assert not path.exists()
    run.saved(3, run.part(3, "trainer"))
    assert run.told.get(timeout=60) == 3
    assert run.completer.close(60)
    assert run.steps() == [3]


def test_temporary_orchestrator_files_are_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    run.part(2, "orchestrator")
    renamed = path / "orchestrator" / "state.json.tmp"
    renamed.symlink_to("gone")  # listed in the folder, but cannot be opened
    run.saved(2, path)
    run.completer.agreed(2)
    assert run.told.get(timeout=60) == 2
    renamed.unlink()
    renamed.write_text("of a later look")
    assert [entry.path for entry in describe_part(path, path / "orchestrator")] == ["orchestrator/data"]
    assert run.completer.close(60)
    assert run.completer.failure is None


def test_shards_saved_again_join_the_orchestrator_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    run.part(2, "orchestrator")
    run.completer.agreed(2)
    with monkeypatch.context() as patch:

        def refuse(folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(completion, "flush_trainer_part", refuse)
        run.saved(2, path)
        assert not run.completer.wait_for(2, worth=lambda: True)
    assert sorted(part.name for part in path.iterdir()) == ["orchestrator"]
    run.saved(2, run.part(2, "trainer"))
    assert run.told.get(timeout=60) == 2
    assert run.completer.close(60)
    assert run.steps() == [2]


def test_refusal_is_cleared_when_step_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trainer removes and writes shards while it creates their manifest, and fails with a missing file."""
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    with monkeypatch.context() as patch:

        def refuse(folder: Path) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        patch.setattr(completion, "flush_trainer_part", refuse)
        run.saved(2, path)
        assert not run.completer.wait_for(2, worth=lambda: True)
    run.part(2, "orchestrator")
    run.saved(2, run.part(2, "trainer"))
    assert run.completer.refused is None
    looks = iter(range(5))
    assert not run.completer.wait_for(2, worth=lambda: next(looks, None) is not None)
    assert next(looks, None) is None, "the wait ended because of the earlier refusal"
    run.completer.agreed(2)
    assert run.completer.wait_for(2, worth=lambda: True)
    assert run.completer.close(60)
    assert run.steps() == [2]


def test_refused_checkpoint_is_retried_with_longer_waits(tmp_path: Path) -> None:
    now = [0.0]
    volume = Volume(tmp_path)
    retry = Retry(volume, clock=lambda: now[0])
    waits = []
    for step in range(8):
        refused, began = Refused(step, Trouble("StorageFull", "the volume is full")), now[0]
        while not retry.is_due(refused, blocks=False):
            now[0] += 1
        waits.append(now[0] - began)
    assert waits == [5, 10, 20, 40, 80, 120, 120, 120]
    assert volume.trouble() is not None
    retry.report_durable()
    assert volume.trouble() is None
    assert not retry.is_due(Refused(9, Trouble("StorageFull", "full again")), blocks=True)


@pytest.mark.parametrize(("damage", "said"), [("missing", "is missing"), ("short", "bytes instead of")])
def test_damaged_shards_are_not_marked_complete(tmp_path: Path, damage: str, said: str) -> None:
    run = Run(tmp_path, with_orchestrator=False)
    path = run.part(2, "trainer")
    files = describe_part(path, path / "trainer")
    (path / "trainer" / "data").unlink()
    if damage == "short":
        (path / "trainer" / "data").write_text("trainer")
    (path / "trainer" / "other").write_text("there is another one")
    run.completer.saved(2, path, files)
    assert run.completer.close(60)
    assert run.steps() == []
    assert said in str(run.completer.failure)
