"""Files for people: `metrics.jsonl`, with one line per step in order, and the traces of rollouts."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.aio.volume_access import BestEffortWriter
from rlrun.orchestrator.progress.step_metrics import step_line
from rlrun.orchestrator.types import FinishedGroup
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.durable import write_bytes, write_chunks
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import FURTHEST, MetricsLine, keep_metrics, metrics_lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import read_fork

KEPT_TRACE_INTERVAL = 100
"""Interval of the steps that keep their trace beyond the newest `orchestrator.keepTraces` steps."""
_TAIL_BYTES = 1024 * 1024
"""Upper bound on the length of a line."""


class MetricsFile:
    """Only writer of `metrics.jsonl`. A step's line is written when all its parts are known, and lines are in order of
    step.

    Args:
        path: path of the file.
        attempt: number of the attempt, part of each line.
        base_step: base step of the attempt. Lines of later steps belong to lost versions and are removed.
        unwritten: lines up to the base that the earlier attempt had not written.
        evaluated: whether a version is evaluated; its line then waits for the evaluation.
        writer: background writer.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        base_step: int,
        unwritten: Iterable[Mapping[str, float]],
        evaluated: Callable[[int], bool],
        writer: BestEffortWriter,
    ) -> None:
        self._path, self._attempt, self._evaluated, self._writer = path, attempt, evaluated, writer
        unwritten = [dict(line) for line in unwritten]
        matters = {base_step, *(int(line["step"]) for line in unwritten)}
        self._furthest = 0
        """Highest step trained before this attempt, read from the file."""
        self.last: MetricsLine = {}
        """Newest line."""
        self.tokens, self.samples = 0, 0
        """Tokens and samples of all steps with a line, of this attempt and earlier ones; in a fork only its own steps.
        """
        # Lines above the base belong to versions that this attempt trains again. They are removed
        # before the first new line is written.
        written, whole = self._take_over(base_step, matters)
        writer.write(path.name, lambda: keep_metrics(path, through=base_step, prefix=whole), keep=True)
        self._lines: dict[int, MetricsLine] = {}
        self._parts: dict[int, set[str]] = {}
        """Known parts of the steps in `_lines`."""
        self._flushed = -1
        """Highest step whose line was passed to the writer, in order of step."""
        self._leaving: deque[tuple[int, MetricsLine]] = deque()
        """Complete lines in the queue of the writer, which removes them from the left."""
        self._successor: int | None = None
        """Number of a later attempt that has started, or None."""
        for late in unwritten:
            step = int(late["step"])
            if step not in written:
                self._lines[step] = dict(late)
                # Only the base version can still be evaluated: engines cannot load older versions.
                self._parts[step] = {"batch", "trained"} | ({"evaluation"} if step < base_step else set())
        self.wants_base = evaluated(base_step) and base_step not in written
        """Whether the evaluation of the base version is still missing."""
        if self.wants_base:
            # The version of the base waits for its evaluation again, because the earlier attempt
            # ended before it.
            self._lines.setdefault(base_step, {})
            self._parts.setdefault(base_step, {"batch", "trained"})
        self._flush_lines()

    def _take_over(self, base_step: int, matters: Collection[int]) -> tuple[set[int], int | None]:
        """Read the lines of earlier attempts, one at a time.

        Returns:
            Steps of `matters` with a line, and the number of bytes of the kept lines. The number is None if the kept
            lines are not the start of the file.
        """
        path, written = self._path, set[int]()
        forked, damaged = read_fork(RunPaths(path.parent).fork), 0
        prefix, size, kept_bytes = 0, 0, 0
        """Bytes of the kept lines before the first other line, of all lines, and of all kept lines."""
        for text, line in metrics_lines(path):
            if prefix == size and line is not None and line["step"] <= base_step:
                prefix += len(text)
            size += len(text)
            if line is None:
                damaged += 1
                continue
            # Read before the lines above the base are skipped: repeated steps are marked, so that
            # users see work that is done twice.
            self._furthest = max(self._furthest, _read_count(line.get(FURTHEST, line["step"])))
            if line["step"] > base_step:
                continue
            kept_bytes += len(text)
            self.last = line
            if line["step"] in matters:
                written.add(int(line["step"]))
            # Lines that a fork has copied belong to the other run, and so do their tokens and
            # samples.
            if forked is None or line.get("attempt", 0) > forked.attempt:
                self._count_line(line)
        if damaged:
            self._keep_damaged(damaged)
        # Blank lines and a torn last line are in no sum; the file is then parsed again.
        whole = prefix if prefix == kept_bytes and path.is_file() and path.stat().st_size == size else None
        return written, whole

    def _count_line(self, line: MetricsLine) -> None:
        self.tokens += _read_count(line.get("batch/tokens", 0))
        self.samples += _read_count(line.get("batch/samples", 0))

    def _keep_damaged(self, count: int) -> None:
        """Copy damaged lines to a separate file, before the kept lines replace the file."""
        kept = self._path.with_name(f"metrics.damaged.a{self._attempt:04d}.jsonl")

        def write() -> None:
            write_chunks(kept, (line for line, found in metrics_lines(self._path) if found is None))

        self._writer.write(kept.name, write, keep=True)
        logger.warning(f"{self._path}: {count} damaged line(s) removed; {kept.name} contains them")

    def add(self, step: int, part: Literal["batch", "trained", "evaluation"], values: Mapping[str, float]) -> None:
        """Add one part of a step's line. A canceled evaluation adds an empty part."""
        self._lines.setdefault(step, {}).update(values)
        # A late part of a written step makes another line at once.
        before = set() if step > self._flushed else {"batch", "trained", "evaluation"}
        self._parts.setdefault(step, before).add(part)
        self._flush_lines()

    def unwritten(self, through: int) -> tuple[MetricsLine, ...]:
        """Return the lines up to a step that wait only for their evaluation or for the volume. The step's checkpoint
        has to contain them.
        """
        # A copy, because the writer's thread removes lines at the same time.
        leaving = {step: line for step, line in tuple(self._leaving) if step <= through}
        waiting = {
            step: {"step": step} | line
            for step, line in self._lines.items()
            if step <= through and self._parts[step] >= {"batch", "trained"}
        }
        return tuple(line for _, line in sorted((leaving | waiting).items()))

    def pending(self) -> list[int]:
        """Return the steps with an incomplete line."""
        return sorted(self._lines)

    def _flush_lines(self) -> None:
        while self._lines:
            # In the order of steps: a line that waits for its evaluation holds back the later
            # lines, so that readers can follow the file.
            step = min(self._lines)
            needed = {"batch", "trained"} | ({"evaluation"} if self._evaluated(step) else set())
            if not self._parts[step] >= needed:
                return
            self._check_alone()
            line = {"step": step, "attempt": self._attempt, "time": time.time()} | self._lines.pop(step)
            del self._parts[step]
            self._flushed = max(self._flushed, step)
            if step <= self._furthest:
                line[FURTHEST] = self._furthest
            self._count_line(line)
            self._leaving.append((step, line))
            self._writer.write(self._path.name, self._append_line, keep=True)
            self.last = line
            logger.info(step_line(line))

    def _check_alone(self) -> None:
        if self._successor is not None:
            raise RoleError(f"attempt {self._successor} of this run has started, so attempt {self._attempt} is over")

    def _append_line(self) -> None:
        """Write the oldest queued line, in the writer's thread.

        No line is written after a later attempt has started: processes on an unreachable node may still run while their
        successors train, and both write this file.
        """
        # Read for each line, immediately before it is written: that keeps the time short in which
        # two attempts can write.
        newest = max(RunPaths(self._path.parent).attempts_on_disk(), default=0)
        if newest > self._attempt:
            self._successor = newest
        else:
            _, line = self._leaving[0]
            append_line(self._path, json.dumps(line))
            reach("metrics.written")
        # Removed after the write: until then a checkpoint contains the line, and a kill between the
        # two cannot lose it.
        self._leaving.popleft()


def _read_count(value: float) -> int:
    """Read a count; 0 for an infinite value of a damaged line."""
    return int(value) if math.isfinite(value) else 0


def append_line(path: Path, line: str) -> None:
    """Append a line durably, completely and once. The remains of a refused write are cut off, at the latest by the next
    call.

    Raises:
        OSError: the volume refuses the write.
    """
    with path.open("a+b", buffering=0) as file:
        # Only the end of the file is read; the file of a long run has many megabytes.
        before = file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read()
        before += len(tail)
        content = (line + "\n").encode()
        if tail and not tail.endswith(b"\n"):  # remains of a refused write
            before += tail.rfind(b"\n") + 1 - len(tail)
            file.truncate(before)
        elif (b"\n" + tail).endswith(
            b"\n" + content
        ):  # complete, but its flush failed, and a later flush does not write it
            before -= len(content)
            file.truncate(before)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            # Without this, the next line would continue a torn one, and readers would lose both.
            file.truncate(before)
            raise


def version_spans(versions: npt.ArrayLike) -> list[dict[str, int]]:
    """Return the runs of equal versions `[T]` as `{version, start, end}` over token positions, without tokens of no
    version.
    """
    values = np.asarray(versions, np.int32)
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    runs = [(int(values[start]), start, end) for start, end in pairwise(edges) if start < end]
    return [{"version": version, "start": start, "end": end} for version, start, end in runs if version >= 0]


def _trained_advantage(samples: Sequence[Sample]) -> float | None:
    """Return the advantage of a rollout, or None if a filter masked it."""
    return next((float(s.advantages[s.loss_mask][0]) for s in samples if s.loss_mask.any()), None)


def write_trace(path: Path, batch: Batch, groups: Sequence[FinishedGroup]) -> None:
    """Write one line per rollout of a step."""
    samples: dict[tuple[int, int], list[Sample]] = {}
    for sample in batch.samples:
        samples.setdefault((sample.group, sample.rollout), []).append(sample)
    lines = []
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            own = samples[group.number, number]
            lines.append(
                {
                    "step": batch.step,
                    "attempt": batch.attempt,
                    "group": group.number,
                    "rollout": number,
                    "environment": group.environment,
                    "task_id": group.task_id,
                    "dispatch_version": group.dispatch_version,
                    "reward": rollout.reward,
                    "advantage": _trained_advantage(own),
                    "metrics": dict(rollout.metrics),
                    "messages": list(rollout.messages),
                    "completion": "\n".join(rollout.texts),
                    "finish_reason": rollout.finish_reason,
                    "truncated": rollout.truncated,
                    "tokens": rollout.tokens,
                    "completion_tokens": rollout.loss_tokens,
                    "versions": [version_spans(s.versions) for s in rollout.sequences],
                    "seconds": round(rollout.seconds, 4),
                }
            )
    write_jsonl(path, lines)


def is_trace_old(step: int, *, newest: int, keep: int) -> bool:
    """Return whether the trace of `step` is deleted once the trace of step `newest` exists.

    Args:
        step: step of the trace.
        newest: step of the newest trace.
        keep: number of traces to keep (`orchestrator.keepTraces`).
    """
    return 0 < step <= newest - keep and step % KEPT_TRACE_INTERVAL != 0


def delete_old_traces(paths: RunPaths, *, newest: int, keep: int) -> None:
    """Delete expired traces left by earlier attempts with a larger limit or by failed deletions."""
    for number in paths.traced_steps():
        if is_trace_old(number, newest=newest, keep=keep):
            paths.trace(number).unlink(missing_ok=True)


def write_jsonl(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Replace a JSONL file."""
    write_bytes(path, "".join(json.dumps(line, default=str) + "\n" for line in lines).encode())
