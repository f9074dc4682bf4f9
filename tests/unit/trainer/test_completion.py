"""Manifests are written last, once both parts are there."""

from __future__ import annotations

import queue
from pathlib import Path

from rlrun.config.checkpoint import CheckpointConfig
from rlrun.protocol.attempts import first_attempt
from rlrun.protocol.manifest import complete_checkpoints, read_manifest, verify
from rlrun.protocol.paths import RunPaths
from rlrun.trainer.completion import Completer


class Run:
    """A completer and what it told."""

    def __init__(self, root: Path, *, with_orchestrator: bool = True, keep_last: int = 3) -> None:
        self.paths = RunPaths(root)
        self.told: queue.Queue[int] = queue.Queue()
        self.completer = Completer(
            self.paths,
            first_attempt(world_size=2, config_hash="h"),
            CheckpointConfig(keep_last=keep_last),
            with_orchestrator=with_orchestrator,
            on_complete=lambda step, path: self.told.put(step),
        )

    def part(self, step: int, part: str) -> Path:
        path = self.paths.checkpoint(step, 1)
        (path / part).mkdir(parents=True)
        (path / part / "data").write_text(f"{part} {step}")
        return path

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in complete_checkpoints(self.paths)]


def test_it_is_complete_only_with_both_parts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    run.completer.saved(2, path)
    other = run.part(4, "trainer")
    run.part(4, "orchestrator")
    run.completer.agreed(4)  # may come before the shards' checksums are known
    run.completer.saved(4, other)
    assert run.told.get(timeout=10) == 4
    assert run.completer.close(10)
    assert run.steps() == [4]
    manifest = read_manifest(other)
    verify(other, manifest)
    assert {entry.path for entry in manifest.files} == {"trainer/data", "orchestrator/data"}
    assert (manifest.world_size, manifest.config_hash) == (2, "h")
    assert run.completer.failure is None


def test_old_ones_are_deleted_after_the_new_one_is_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, with_orchestrator=False, keep_last=2)
    for step in (2, 4, 6):
        run.completer.saved(step, run.part(step, "trainer"))
    assert run.completer.close(10)
    assert run.steps() == [4, 6]
    assert [artifact.step for artifact in run.paths.checkpoints_on_disk()] == [4, 6]


def test_a_late_word_on_a_deleted_one_is_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.completer.saved(2, run.part(2, "trainer"))
    path = run.part(4, "trainer")
    run.part(4, "orchestrator")
    run.completer.saved(4, path)
    run.completer.agreed(4)
    run.completer.agreed(2)
    assert run.completer.close(10)
    assert run.steps() == [4]
    assert run.completer.failure is None


def test_a_failure_is_kept_for_the_loop(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.part(2, "trainer")
    run.completer.saved(2, path)
    run.completer.agreed(2)  # but there is no part of the orchestrator
    assert run.completer.close(10)
    assert run.completer.failure is not None
    assert "orchestrator holds no files" in str(run.completer.failure)
    assert run.steps() == []
