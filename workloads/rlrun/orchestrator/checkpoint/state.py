"""The orchestrator's part of a checkpoint, and what a new attempt takes over from the lineage before it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.journal.ledger import FORMAT_VERSION, Ledger, LedgerError, LedgerState
from rlrun.orchestrator.staleness import too_old
from rlrun.orchestrator.tasks.sampler import SamplerState
from rlrun.protocol.files.attempts import Attempt, earlier_attempts, is_lost
from rlrun.protocol.files.batch import NO_VERSION, Batch, BatchError, read_batch
from rlrun.protocol.files.checkpoint_manifest import ORCHESTRATOR_PART, complete_checkpoints
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import MetricsLine
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

STATE_FILE = "state.json"


class TaskSet(TypedDict):
    """Training tasks of an environment, as far as another data set has to be recognized."""

    size: int
    digest: str
    """See `distinct.check_distinct`; "": unknown."""


@dataclass(frozen=True)
class Snapshot:
    """The orchestrator at the moment when the batch of a step was made."""

    step: int
    ledger: LedgerState
    unwritten: tuple[MetricsLine, ...] = field(default=())
    """Lines of steps up to this one that wait for an evaluation before they go to `metrics.jsonl`."""
    sampler: SamplerState = field(default_factory=SamplerState)
    """`Sampler.state`."""
    tasks: dict[str, TaskSet] = field(default_factory=dict)
    """Training tasks by the environment's label; of checkpoints of earlier releases empty."""


def write_snapshot(checkpoint: Path, snapshot: Snapshot) -> None:
    """Make the orchestrator's part of `checkpoint` durable."""
    document = asdict(snapshot) | {"format_version": FORMAT_VERSION}
    state = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    write_json(state, document, before_rename="checkpoint.orchestrator.before_rename")
    reach("checkpoint.orchestrator.written")


def read_snapshot(checkpoint: Path) -> Snapshot:
    """Read the orchestrator's part.

    Raises:
        RoleError: it is missing or of another format; starting again cannot help.
    """
    path = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    try:
        document = json.loads(path.read_text())
        if document.pop("format_version") != FORMAT_VERSION:
            raise ValueError("it is of another format")
        ledger = document["ledger"]
        state = LedgerState(int(ledger["next_group"]), tuple(ledger["open_groups"]), dict(ledger["counters"]))
        unwritten, sampler = tuple(document["unwritten"]), document.get("sampler", {})
        return Snapshot(int(document["step"]), state, unwritten, sampler, document.get("tasks", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoleError(
            f"cannot resume from {checkpoint}: its part {path.relative_to(checkpoint)} cannot be read ({error})",
            exit_codes.DATA,
        ) from error


def report_changed_tasks(base: Snapshot, present: Mapping[str, TaskSet]) -> set[str]:
    """Log a warning for each environment whose training tasks are not those of the checkpoint.

    Args:
        base: start of this attempt.
        present: this attempt's training tasks, by the environment's label.

    Returns:
        Labels of these environments.
    """
    changed = set()
    for label, now in present.items():
        before = base.tasks.get(label)
        # A digest that is unknown on one side says nothing.
        if before is None or (now["size"], now["digest"] or before["digest"]) == (
            before["size"],
            before["digest"] or now["digest"],
        ):
            continue
        changed.add(label)
        logger.warning(
            f"environment {label!r} has other training tasks than the checkpoint of step {base.step}: {_describe_tasks(now)} instead of "
            f"{_describe_tasks(before)}; its finished rollouts that are in no batch do not count, and curricula start again. To "
            "train on the "
            "same tasks as before, restore the data or set its revision"
        )
    return changed


def _describe_tasks(tasks: TaskSet) -> str:
    return f"{tasks['size']} tasks (digest {tasks['digest'] or 'unknown'})"


def base_snapshot(paths: RunPaths, attempt: Attempt) -> Snapshot:
    """Start of this attempt; the very beginning when its base is the model."""
    if attempt.base_attempt is None:
        return Snapshot(0, Ledger().state())
    return read_snapshot(paths.checkpoint(attempt.base_step, attempt.base_attempt))


def _refuse_batch(batch: Batch, writer: Attempt, attempt: Attempt, max_off_policy_steps: int) -> str | None:
    """Reason why this attempt cannot train a batch of another one; None when it can."""
    if writer.origin != attempt.origin:
        return f"attempt {writer.attempt} began with other weights"
    for sample in batch.samples:
        if too_old(sample.dispatch_version, step=batch.step, max_off_policy_steps=max_off_policy_steps):
            return f"group {sample.group} is too old"
    if batch.max_version != NO_VERSION and is_lost(batch.max_version, writer, attempt):
        return f"version {batch.max_version} of attempt {writer.attempt} is lost"
    return None


def readmissible_batches(
    paths: RunPaths, attempt: Attempt, ledger: Ledger, *, max_off_policy_steps: int
) -> Iterator[Batch]:
    """Batches of the steps after the base that earlier attempts made and that can be trained as they are, in order, without a gap.

    Their groups are taken into the ledger, so they are never sampled again. Stops at the first step that has none.
    """
    writers = earlier_attempts(paths, attempt, log=logger.warning)
    found = [artifact for artifact in paths.batches_on_disk() if artifact.attempt in writers]
    step = attempt.base_step
    while True:
        step += 1
        for artifact in sorted((a for a in found if a.step == step), reverse=True):
            try:
                batch = read_batch(artifact.path)
                refusal = _refuse_batch(batch, writers[artifact.attempt], attempt, max_off_policy_steps)
                if refusal is None:
                    ledger.readmit({s.group for s in batch.samples}, {d.group: d.reason for d in batch.dropped})
                    break
            except (BatchError, LedgerError) as error:
                refusal = str(error)
            logger.info(f"{artifact.path.name} is not taken over: {refusal}")
        else:
            return
        logger.info(f"{artifact.path.name} of attempt {artifact.attempt} is taken over")
        yield replace(batch, attempt=attempt.attempt)


def remove_covered_batches(paths: RunPaths, attempt: Attempt) -> list[int]:
    """Delete the batches of steps that even the oldest complete checkpoint of this lineage covers; returns these steps."""
    kept = attempt.owned(complete_checkpoints(paths))
    if not kept:
        return []
    return remove_batches(paths, through=kept[0].step)


def newest_complete(paths: RunPaths, attempt: Attempt) -> Snapshot | None:
    """The orchestrator's part of the newest complete checkpoint of this lineage; None while there is none that can be read.

    The trainer may delete it at this very moment, because there is a newer one by now.
    """
    kept = attempt.owned(complete_checkpoints(paths))
    try:
        return read_snapshot(kept[-1].path) if kept else None
    except RoleError as error:
        logger.info(f"nothing is deleted of the journal now: {error}")
        return None


def remove_batches(paths: RunPaths, *, through: int) -> list[int]:
    """Delete the batches of all steps up to `through`, of any attempt; returns these steps."""
    covered = [artifact for artifact in paths.batches_on_disk() if artifact.step <= through]
    for artifact in covered:
        shutil.rmtree(artifact.path, ignore_errors=True)
    return [artifact.step for artifact in covered]
