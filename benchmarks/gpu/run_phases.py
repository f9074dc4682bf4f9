"""Phases of the steps of a run, by the trainer's own times: use and memory of the GPU in each of them.

A step of the trainer is, in this order: `rollouts` (it waits for the batch; in a colocated run the engine wakes up, loads
the version and samples), `turn` (it waits until the engine sleeps), `training` (forward, backward and optimizer), `hand-over`
(it writes the version) and `rest`, which includes moves between GPU and host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.run_events import IDLE_BELOW, MIB, GpuSample

PHASES: Mapping[str, tuple[str, ...]] = {
    "rollouts": ("time/wait_for_batch",),
    "turn": ("time/wait_for_turn",),
    "training": ("time/forward_backward", "time/optimizer"),
    "hand-over": ("time/broadcast_weights", "time/save_ckpt"),
}
"""Metrics of each phase, in order of time."""
REST = "rest"


@dataclass(frozen=True)
class Span:
    """One phase of one step. Times of `time.time`, in seconds."""

    phase: str
    start: float
    end: float


def step_spans(line: Mapping[str, Any]) -> list[Span]:
    """Return the phases of a step, or nothing for a line without a trained step.

    Args:
        line: metrics of the step. `time` is its end, and `time/step` its duration.
    """
    if "time/step" not in line:
        return []
    at = float(line["time"]) - float(line["time/step"])
    spans = []
    for phase, metrics in PHASES.items():
        end = at + sum(float(line.get(metric, 0.0)) for metric in metrics)
        spans.append(Span(phase, at, end))
        at = end
    return [*spans, Span(REST, at, max(at, float(line["time"])))]


def phase_rows(lines: Iterable[Mapping[str, Any]], samples: Sequence[GpuSample], clock: float) -> dict[str, Any]:
    """Return a row for each phase: seconds of a step, and use and memory of the GPU.

    Args:
        lines: metrics of the steps. The first step compiles kernels and is left out.
        samples: samples of the GPU.
        clock: difference of `time.monotonic` to `time.time`, in seconds: the samples have the former.
    """
    spans = [span for line in lines if int(line["step"]) > 1 for span in step_spans(line)]
    rows = {}
    for phase in (*PHASES, REST):
        own = [span for span in spans if span.phase == phase]
        if not own:
            continue
        found = [
            sample for span in own for sample in samples if span.start + clock <= sample.time < span.end + clock
        ]  # fmt: skip
        row: dict[str, Any] = {
            "s per step": sum(span.end - span.start for span in own) / len(own),
            "samples": len(found),
        }
        if known := [sample.utilization for sample in found if sample.utilization is not None]:
            row["idle share"] = sum(value < IDLE_BELOW for value in known) / len(known)
        if used := sorted(sample.used_bytes / MIB for sample in found):
            row |= {"least MiB": used[0], "median MiB": used[len(used) // 2], "most MiB": used[-1]}
        rows[phase] = row
    return rows


def sampled_versions(traces: Path) -> tuple[set[int], int]:
    """Return the versions that sampled the tokens of a run's batches, and the number of tokens without a version.

    Args:
        traces: folder with a file for each trained step.
    """
    versions, unknown = set[int](), 0
    for file in sorted(traces.glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            known = 0
            for span in (span for turn in row["versions"] for span in turn):
                if isinstance(span["version"], int):
                    versions.add(span["version"])
                    known += span["end"] - span["start"]
            unknown += max(0, row["completion_tokens"] - known)
    return versions, unknown


def worst_of_steps(values: Sequence[float], steps: int) -> float | None:
    """Return the largest value of a metric that every step must have: not a number if a step lacks it, None if all do."""
    if not values:
        return None
    return max(values) if len(values) == steps else float("nan")
