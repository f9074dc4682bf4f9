"""Durable writes of the roles, with the roles' own waits for the volume, but without their pauses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.orchestrator.aio import volume_access
from rlrun.orchestrator.aio.volume_access import BestEffortWriter, retry_until_done
from rlrun.orchestrator.checkpoint import Snapshot, read_snapshot, write_snapshot
from rlrun.orchestrator.journal.frames import DroppedEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import Journal, SegmentWriter
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.progress.metrics_file import MetricsFile
from rlrun.protocol.files import volume_faults
from rlrun.protocol.files.attempts import Attempt, first_attempt, next_attempt, read_attempt, write_attempt
from rlrun.protocol.files.batch import Batch, Sample, read_batch, write_batch
from rlrun.protocol.files.checkpoint_manifest import (
    TRAINER_PART,
    FileEntry,
    complete_checkpoints,
    describe_part,
    flush_trainer_part,
    read_manifest,
    remove_trainer_part,
    verify_files,
)
from rlrun.protocol.files.durable import make_folder, write_bytes
from rlrun.protocol.files.metrics_line import read_metrics
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import keep_config
from rlrun.protocol.files.volume_faults import Volume, trouble_of
from rlrun.trainer.checkpoints import completion, unsaved
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.resume import Beginning, begin_attempt

Seen = Literal["old", "new"]
WAIT_SECONDS = 30.0


class Writer(Protocol):
    """One durable write of a role."""

    def prepare(self, root: Path) -> None:
        """Make the state before the write."""

    def act(self, root: Path, attempt: int) -> None:
        """Write as the role does in an attempt, until the volume accepts it."""

    def seen(self, root: Path) -> Seen:
        """Return the state found by a reader; raise AssertionError if it is neither the state before nor the complete
        write."""


def without_pauses() -> None:
    """Let the roles of this process retry at once."""
    volume_faults.FIRST_PAUSE_SECONDS = volume_faults.LONGEST_PAUSE_SECONDS = 0.0
    volume_access.RETRY_SECONDS = 0.0
    completion._LOOK_SECONDS = 0.001
    unsaved.FIRST_RETRY_SECONDS = unsaved.LONGEST_RETRY_SECONDS = 0.0


def until_taken(root: Path, doing: str, act: Callable[[], object]) -> None:
    """Write through a role's view of its volume until the volume accepts it."""
    Volume(root).insist(doing, act, wait=lambda seconds: None)


def batch_of(step: int, attempt: int) -> Batch:
    """Return a batch of one sample."""
    sample = Sample(
        input_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0, -0.1], np.float32),
        versions=np.array([-1, 0], np.int32),
        advantages=np.array([0, 1], np.float32),
        temperature=1.0,
        environment="e",
        task_id="t",
        group=0,
        rollout=0,
        dispatch_version=0,
        reward=1.0,
    )
    return Batch(step, attempt, (sample,))


class BatchWriter:
    """A batch, by the orchestrator."""

    def prepare(self, root: Path) -> None:
        write_batch(RunPaths(root).batch(1, 1), batch_of(1, 1))

    def act(self, root: Path, attempt: int) -> None:
        write = partial(write_batch, RunPaths(root).batch(2, attempt), batch_of(2, attempt))
        asyncio.run(retry_until_done(Volume(root), "write a batch", write))

    def seen(self, root: Path) -> Seen:
        batches = sorted({read_batch(artifact.path).step for artifact in RunPaths(root).batches_on_disk()})
        assert batches in ([1], [1, 2]), batches
        return "new" if 2 in batches else "old"


class AttemptWriter:
    """The file of an attempt, by the trainer."""

    def prepare(self, root: Path) -> None:
        write_attempt(RunPaths(root), first_attempt(world_size=1, config_hash="h"))

    def act(self, root: Path, attempt: int) -> None:
        number = attempt + 1
        paths, beginning = RunPaths(root), Beginning()

        def begin() -> Attempt:
            return begin_attempt(paths, None, attempt=number, world_size=1, config_hash="h", beginning=beginning)

        until_taken(root, "begin the attempt", begin)

    def seen(self, root: Path) -> Seen:
        paths = RunPaths(root)
        numbers = paths.attempts_on_disk()
        assert [read_attempt(paths.attempt_file(number)).attempt for number in numbers] == numbers
        assert numbers[0] == 1
        return "new" if len(numbers) > 1 else "old"


class ConfigWriter:
    """`run.json` and the attempt's copy of it, by a starting pod."""

    def prepare(self, root: Path) -> None:
        write_bytes(RunPaths(root).run_json, b"old")

    def act(self, root: Path, attempt: int) -> None:
        paths = RunPaths(root)
        until_taken(root, "write run.json", lambda: write_bytes(paths.run_json, b"new"))
        until_taken(root, "keep run.json", lambda: keep_config(paths, attempt, b"new"))

    def seen(self, root: Path) -> Seen:
        paths = RunPaths(root)
        content = paths.run_json.read_bytes()
        kept = (
            {path.read_bytes() for path in paths.attempts.glob("*.config.json")} if paths.attempts.is_dir() else set()
        )
        assert content in (b"old", b"new"), content
        assert kept <= {b"new"}, kept
        return "new" if kept and content == b"new" else "old"


def dropped(group: int) -> DroppedEntry:
    """Return an entry of the journal."""
    return DroppedEntry(group, "filtered", 0.5, group + 1, 0)


class JournalWriter:
    """Finished rollouts, by the orchestrator."""

    GROUPS = range(1, 4)

    def prepare(self, root: Path) -> None:
        writer = SegmentWriter(RunPaths(root), attempt=1, fingerprint="f")
        writer.write([dropped(0)])
        writer.close()

    def act(self, root: Path, attempt: int) -> None:
        asyncio.run(self._act(root, attempt + 1))

    async def _act(self, root: Path, attempt: int) -> None:
        journal = Journal(SegmentWriter(RunPaths(root), attempt=attempt, fingerprint="f"), Volume(root))
        for group in self.GROUPS:
            await journal.add(dropped(group))
        await journal.close()

    def seen(self, root: Path) -> Seen:
        found = [e.group for s in RunPaths(root).journal_on_disk() for e in read_segment(s.path).entries]
        distinct = sorted(set(found))
        assert distinct == list(range(len(distinct))), found
        assert distinct, "an entry that was durable is lost"
        return "new" if distinct == [0, *self.GROUPS] else "old"


class MetricsWriter:
    """Lines of `metrics.jsonl`, by the orchestrator."""

    def prepare(self, root: Path) -> None:
        lines = [json.dumps({"step": step, "attempt": 1}) + "\n" for step in (1, 2)]
        write_bytes(RunPaths(root).metrics, "".join(lines).encode())

    def act(self, root: Path, attempt: int) -> None:
        writer = BestEffortWriter()
        metrics = MetricsFile(
            RunPaths(root).metrics,
            attempt=attempt + 1,
            base_step=2,
            unwritten=(),
            evaluated=lambda step: False,
            writer=writer,
        )
        for step in (3, 4):
            metrics.add(step, "batch", {})
            metrics.add(step, "trained", {})
        done = list[bool]()
        writer.write("the end", lambda: done.append(True), keep=True)
        while not done and writer._thread.is_alive():
            writer._thread.join(0.001)
        writer.close()

    def seen(self, root: Path) -> Seen:
        lines, damaged = read_metrics(RunPaths(root).metrics)
        steps = [int(line["step"]) for line in lines]
        assert not damaged
        assert steps in ([1, 2], [1, 2, 3], [1, 2, 3, 4]), steps
        return "new" if len(steps) == 4 else "old"


class CheckpointWriter:
    """A checkpoint: shards of stand-in content, then the orchestrator's part, the manifest and retention, as the roles write them."""

    def prepare(self, root: Path) -> None:
        write_attempt(RunPaths(root), first_attempt(world_size=1, config_hash="h"))
        self._save(root, self.attempt(1), 1)

    @staticmethod
    def attempt(number: int) -> Attempt:
        """The first attempt, or a later one that starts from its checkpoint."""
        first = first_attempt(world_size=1, config_hash="h")
        return first if number == 1 else next_attempt(first, 1, attempt=number, world_size=1, config_hash="h")

    def act(self, root: Path, attempt: int) -> None:
        self._save(root, self.attempt(attempt), 2)

    def _save(self, root: Path, attempt: Attempt, step: int) -> None:
        paths, volume = RunPaths(root), Volume(root)
        completer = Completer(
            paths,
            attempt,
            CheckpointConfig(keep_last=1),
            with_orchestrator=True,
            on_complete=lambda step, path: None,
            volume=volume,
        )
        path = paths.checkpoint(step, attempt.attempt)
        until_taken(
            root, "save the orchestrator's part", lambda: write_snapshot(path, Snapshot(step, Ledger().state()))
        )
        completer.agreed(step)
        while True:
            completer.saved(step, path, self._save_shards(path, step))
            if completer.wait_for(step, worth=lambda: True):
                break
            if completer.failure is not None:
                raise completer.failure
        assert completer.close(WAIT_SECONDS)
        if completer.failure is not None:
            raise completer.failure

    def _save_shards(self, path: Path, step: int) -> list[FileEntry]:
        """Write the shards until the volume accepts them; the trainer's loop also removes those of a refused attempt."""
        while True:
            try:
                make_folder(path / TRAINER_PART)
                for name in ("a", "b"):
                    (path / TRAINER_PART / name).write_bytes(b"shard" * step)
                flush_trainer_part(path)
                return describe_part(path, path / TRAINER_PART)
            except OSError as error:
                if trouble_of(error, path) is None:
                    raise
                with suppress(OSError):
                    remove_trainer_part(path)

    def seen(self, root: Path) -> Seen:
        found = complete_checkpoints(RunPaths(root))
        for checkpoint in found:
            verify_files(checkpoint.path, read_manifest(checkpoint.path))
            assert read_snapshot(checkpoint.path).step == checkpoint.step
        assert found, "no checkpoint is complete"
        return "new" if found[-1].step == 2 else "old"


WRITERS: dict[str, Writer] = {
    "batch": BatchWriter(),
    "attempt": AttemptWriter(),
    "configuration": ConfigWriter(),
    "journal": JournalWriter(),
    "metrics": MetricsWriter(),
    "checkpoint": CheckpointWriter(),
}
