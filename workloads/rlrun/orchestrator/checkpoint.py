"""Orchestrator's part of a checkpoint: its content, the state that a new attempt takes over from earlier attempts, and its writer.

The writer works in the background. Training continues while the volume refuses the part.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.aio.volume_access import in_thread
from rlrun.orchestrator.journal.ledger import FORMAT_VERSION, Ledger, LedgerError, LedgerState
from rlrun.orchestrator.staleness import too_old
from rlrun.orchestrator.tasks.sampler import SamplerState
from rlrun.orchestrator.trainer.trainer_client import TrainerGoneError
from rlrun.protocol.files.attempts import Attempt, earlier_attempts, is_lost
from rlrun.protocol.files.batch import NO_VERSION, Batch, BatchError, read_batch
from rlrun.protocol.files.checkpoint_manifest import ORCHESTRATOR_PART, complete_checkpoints
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import MetricsLine
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import RefusedError, Volume, retry_pauses
from rlrun.runtime import exit_codes

STATE_FILE = "state.json"


class TaskSet(TypedDict):
    """Size and digest of an environment's training tasks, to detect a changed data set."""

    size: int
    digest: str
    """Digest of `splits.check_distinct`; empty if unknown."""


@dataclass(frozen=True)
class Snapshot:
    """State of the orchestrator at the moment when the batch of a step was made."""

    step: int
    ledger: LedgerState
    unwritten: tuple[MetricsLine, ...] = field(default=())
    """Metrics lines up to this step that wait for an evaluation before they go to `metrics.jsonl`."""
    sampler: SamplerState = field(default_factory=SamplerState)
    """State of the sampler, see `Sampler.state`."""
    tasks: dict[str, TaskSet] = field(default_factory=dict)
    """Training tasks by the environment's label; empty in checkpoints of earlier releases."""


def write_snapshot(checkpoint: Path, snapshot: Snapshot) -> None:
    """Write the orchestrator's part of `checkpoint` durably."""
    document = asdict(snapshot) | {"format_version": FORMAT_VERSION}
    state = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    write_json(state, document, before_rename="checkpoint.orchestrator.before_rename")
    reach("checkpoint.orchestrator.written")


def read_snapshot(checkpoint: Path) -> Snapshot:
    """Read the orchestrator's part of a checkpoint.

    Raises:
        RoleError: the part is missing or has another format; a restart cannot help.
    """
    path = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    try:
        document = json.loads(path.read_text())
        if document.pop("format_version") != FORMAT_VERSION:
            raise ValueError("it has another format")
        ledger = document["ledger"]
        state = LedgerState(int(ledger["next_group"]), tuple(ledger["open_groups"]), dict(ledger["counters"]))
        unwritten, sampler = tuple(document["unwritten"]), document.get("sampler", {})
        return Snapshot(int(document["step"]), state, unwritten, sampler, document.get("tasks", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoleError(
            f"cannot resume from {checkpoint}: {path.relative_to(checkpoint)} is unreadable ({error})",
            exit_codes.DATA,
        ) from error


def report_changed_tasks(base: Snapshot, present: Mapping[str, TaskSet]) -> set[str]:
    """Log a warning for each environment whose training tasks differ from those of the checkpoint.

    Args:
        base: snapshot from which this attempt starts.
        present: this attempt's training tasks, by the environment's label.

    Returns:
        Labels of these environments.
    """
    changed = set()
    for label, now in present.items():
        before = base.tasks.get(label)
        # An unknown digest on one side counts as equal.
        if before is None or (now["size"], now["digest"] or before["digest"]) == (
            before["size"],
            before["digest"] or now["digest"],
        ):
            continue
        changed.add(label)
        logger.warning(
            f"the training tasks of environment {label!r} differ from the checkpoint of step {base.step}: {_describe_tasks(now)} "
            f"instead of {_describe_tasks(before)}; finished rollouts outside of batches are dropped and curricula restart. To keep "
            "the earlier tasks, restore the data or set its revision"
        )
    return changed


def _describe_tasks(tasks: TaskSet) -> str:
    return f"{tasks['size']} tasks (digest {tasks['digest'] or 'unknown'})"


def base_snapshot(paths: RunPaths, attempt: Attempt) -> Snapshot:
    """Return the snapshot from which this attempt starts; an empty one if the attempt starts from the model."""
    if attempt.base_attempt is None:
        return Snapshot(0, Ledger().state())
    return read_snapshot(paths.checkpoint(attempt.base_step, attempt.base_attempt))


def _refuse_batch(batch: Batch, writer: Attempt, attempt: Attempt, max_off_policy_steps: int) -> str | None:
    """Return the reason why this attempt cannot train a batch of another attempt, or None if it can."""
    # The same step of another origin is another policy, so the log-probs of its tokens do not fit.
    if writer.origin != attempt.origin:
        return f"attempt {writer.attempt} started with other weights"
    for sample in batch.samples:
        if too_old(sample.dispatch_version, step=batch.step, max_off_policy_steps=max_off_policy_steps):
            return f"group {sample.group} is too old"
    if batch.max_version != NO_VERSION and is_lost(batch.max_version, writer, attempt):
        return f"version {batch.max_version} of attempt {writer.attempt} is lost"
    return None


def readmissible_batches(
    paths: RunPaths, attempt: Attempt, ledger: Ledger, *, max_off_policy_steps: int
) -> Iterator[Batch]:
    """Yield the batches of earlier attempts after the base that can be trained unchanged, in order, until the first
    gap.

    Their groups are added to the ledger, so they are never sampled again.
    """
    writers = earlier_attempts(paths, attempt, log=logger.warning)
    found = [artifact for artifact in paths.batches_on_disk() if artifact.attempt in writers]
    step = attempt.base_step
    while True:
        step += 1
        # If several attempts made a batch of this step, the batch of the latest attempt is tried first.
        for artifact in sorted((a for a in found if a.step == step), reverse=True):
            try:
                batch = read_batch(artifact.path)
                refusal = _refuse_batch(batch, writers[artifact.attempt], attempt, max_off_policy_steps)
                if refusal is None:
                    # The ledger refuses a batch with a group of an earlier batch: several attempts
                    # may have put it into different steps, and it would be trained twice.
                    ledger.readmit({s.group for s in batch.samples}, {d.group: d.reason for d in batch.dropped})
                    break
            except (BatchError, LedgerError) as error:
                refusal = str(error)
            logger.info(f"{artifact.path.name} is not reused: {refusal}")
        else:
            return
        logger.info(f"{artifact.path.name} of attempt {artifact.attempt} is reused")
        yield replace(batch, attempt=attempt.attempt)


def remove_covered_batches(paths: RunPaths, attempt: Attempt) -> list[int]:
    """Delete the batches of steps that the oldest complete checkpoint of this lineage covers, and return these steps."""
    # The oldest kept checkpoint decides, not the newest: if the newest is damaged, an attempt
    # resumes from an older one and needs the batches after it.
    kept = attempt.owned(complete_checkpoints(paths))
    if not kept:
        return []
    return remove_batches(paths, through=kept[0].step)


def newest_complete(paths: RunPaths, attempt: Attempt) -> Snapshot | None:
    """Return the orchestrator's part of the newest complete checkpoint of this lineage, or None if no checkpoint is
    readable.

    The trainer may delete the checkpoint during the read, because a newer one is complete.
    """
    kept = attempt.owned(complete_checkpoints(paths))
    try:
        return read_snapshot(kept[-1].path) if kept else None
    except RoleError as error:
        logger.info(f"skipped the cleanup of the journal: {error}")
        return None


def remove_batches(paths: RunPaths, *, through: int) -> list[int]:
    """Delete the batches of all steps up to `through` of all attempts, and return these steps."""
    covered = [artifact for artifact in paths.batches_on_disk() if artifact.step <= through]
    for artifact in covered:
        shutil.rmtree(artifact.path, ignore_errors=True)
    return [artifact.step for artifact in covered]


Part = tuple[int, Callable[[], None]]
"""A step and the function that writes its part."""


class PartWriter:
    """Writer of one part after the other. A refused part is retried until a newer checkpoint needs its part.

    Args:
        volume: volume for the parts.
        written: callback with the step whose part is durable.
    """

    def __init__(self, volume: Volume, written: Callable[[int], Awaitable[None]]) -> None:
        self._volume, self._written = volume, written
        self._parts: asyncio.Queue[Part] = asyncio.Queue()

    def put(self, step: int, write: Callable[[], None]) -> None:
        """Queue the part of `step`; `write` makes it durable."""
        self._parts.put_nowait((step, write))

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            step, write = await self._parts.get()
            if await self._write_part(f"save the orchestrator's part of the checkpoint of step {step}", write):
                with suppress(TrainerGoneError):
                    await self._written(step)

    async def _write_part(self, doing: str, write: Callable[[], None]) -> bool:
        for pause in retry_pauses():
            try:
                await in_thread(lambda: self._volume.attempt(doing, write, blocks=False))
            except RefusedError:
                # A newer checkpoint waits for its part. This one stays incomplete and is deleted by
                # retention.
                if not self._parts.empty():
                    break
                await asyncio.sleep(pause)
            else:
                return True
        self._volume.accept(doing)
        return False
