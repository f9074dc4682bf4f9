"""Files for people: `metrics.jsonl`, one line per step in order, and the traces of rollouts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from rlrun.orchestrator.metrics import step_line
from rlrun.orchestrator.rollouts import FinishedGroup
from rlrun.protocol.batch import Batch, Sample
from rlrun.protocol.durable import write_bytes
from rlrun.protocol.failures import storage_errors


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file; a torn last line, of a writer that was killed, is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


class MetricsFile:
    """The one writer of `metrics.jsonl`: a step's line is written once all that belongs into it is known, lines in order of step.

    Args:
        path: the file.
        attempt: goes into each line.
        base_step: lines of later steps belong to versions that are lost; they are removed.
        unwritten: lines up to the base that the attempt before had not written yet.
        evaluated: whether a version is evaluated; its line then waits for that.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        base_step: int,
        unwritten: Iterable[Mapping[str, Any]],
        evaluated: Callable[[int], bool],
    ) -> None:
        self._path, self._attempt, self._evaluated = path, attempt, evaluated
        lines = [line for line in read_lines(path) if line["step"] <= base_step]
        written = {int(line["step"]) for line in lines}
        with storage_errors(path.parent):
            write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.last: dict[str, Any] = lines[-1] if lines else {}
        """The newest line."""
        self._lines: dict[int, dict[str, Any]] = {}
        self._parts: dict[int, set[str]] = {}
        for line in unwritten:
            step = int(line["step"])
            if step not in written:
                self._lines[step] = dict(line)
                # Only the base version can still be evaluated: engines cannot go back further.
                self._parts[step] = {"batch", "trained"} | ({"evaluation"} if step < base_step else set())
        self.wants_base = evaluated(base_step) and base_step not in written
        """Whether the evaluation of the base version is still missing."""
        if self.wants_base:
            self._lines.setdefault(base_step, {})
            self._parts.setdefault(base_step, {"batch", "trained"})
        self._flush()

    def add(self, step: int, part: Literal["batch", "trained", "evaluation"], values: Mapping[str, Any]) -> None:
        """Add one part of a step's line; an evaluation that was given up adds an empty one."""
        self._lines.setdefault(step, {}).update(values)
        self._parts.setdefault(step, set()).add(part)
        self._flush()

    def unwritten(self, through: int) -> tuple[dict[str, Any], ...]:
        """Lines up to a step that lack nothing but their evaluation: its checkpoint has to keep them."""
        return tuple(
            {"step": step} | line
            for step, line in sorted(self._lines.items())
            if step <= through and self._parts[step] >= {"batch", "trained"}
        )

    def pending(self) -> list[int]:
        """Steps of which something is known but not yet written."""
        return sorted(self._lines)

    def _flush(self) -> None:
        while self._lines:
            step = min(self._lines)
            needed = {"batch", "trained"} | ({"evaluation"} if self._evaluated(step) else set())
            if not self._parts[step] >= needed:
                return
            line = {"step": step, "attempt": self._attempt, "time": time.time()} | self._lines.pop(step)
            with storage_errors(self._path.parent), self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.last = line
            logger.info(step_line(line))


def spans(versions: Sequence[int]) -> list[dict[str, int]]:
    """Runs of equal versions as `{version, start, end}` over token positions; tokens of no version are left out."""
    found, position = [], 0
    for version, run in groupby(versions):
        length = len(list(run))
        if version >= 0:
            found.append({"version": int(version), "start": position, "end": position + length})
        position += length
    return found


def _advantage(samples: Sequence[Sample]) -> float | None:
    """None for a rollout that a filter masked."""
    return next((float(s.advantages[s.loss_mask][0]) for s in samples if s.loss_mask.any()), None)


def write_trace(path: Path, batch: Batch, groups: Sequence[FinishedGroup]) -> None:
    """One line per rollout of a step."""
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
                    "advantage": _advantage(own),
                    "metrics": dict(rollout.metrics),
                    "messages": list(rollout.messages),
                    "completion": "\n".join(rollout.texts),
                    "finish_reason": rollout.finish_reason,
                    "truncated": rollout.truncated,
                    "tokens": rollout.tokens,
                    "completion_tokens": rollout.loss_tokens,
                    "versions": [spans(s.versions.tolist()) for s in rollout.sequences],
                    "seconds": round(rollout.seconds, 4),
                }
            )
    write_jsonl(path, lines)


def write_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace a JSONL file."""
    write_bytes(path, "".join(json.dumps(line, default=str) + "\n" for line in lines).encode())
