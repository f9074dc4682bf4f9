"""Records for trackers, one per line of `metrics.jsonl`, their metric names, and the interface of a tracker.

A metric has the name that PRIME-RL 0.3 uses, if it has the metric, so that its panels show our runs, or else our name. The tables are
data: docs/tracking.md shows them, and a test compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

GIB = 1 / 2**30
PERCENT = 100.0
MILLISECONDS = 1000.0

NAMES: Mapping[str, tuple[str, float]] = {
    "loss": ("loss/mean", 1.0),
    "entropy": ("entropy/mean", 1.0),
    "mismatch_kl": ("mismatch_kl/mean", 1.0),
    "mismatch_kl_max": ("mismatch_kl/max", 1.0),
    "lr": ("optim/lr", 1.0),
    "grad_norm": ("optim/grad_norm", 1.0),
    "perf/mfu": ("perf/mfu", PERCENT),
    "perf/peak_memory": ("perf/peak_memory", GIB),
    "batch/tokens": ("progress/tokens", 1.0),
    "batch/rollouts": ("progress/samples", 1.0),
    "batch/groups": ("progress/problems", 1.0),
    "batch/truncated": ("is_truncated/mean", 1.0),
    "completion_length/mean": ("decode_len/mean", 1.0),
    "completion_length/max": ("decode_len/max", 1.0),
    "off_policy/mean": ("off_policy_level/all/mean", 1.0),
    "off_policy/max": ("off_policy_level/all/max", 1.0),
    "time/rollout/mean": ("generation_ms/mean", MILLISECONDS),
    "time/rollout/max": ("generation_ms/max", MILLISECONDS),
    "validation/loss": ("val/loss", 1.0),
    "data/epoch": ("progress/epoch", 1.0),
}
"""PRIME-RL's name and the factor to its unit, by our name. Other names are the same there, or exist only here."""

PATTERNS: tuple[tuple[str, str], ...] = (
    (r"reward/(?P<env>.+)/mean", "reward/{env}"),
    (r"eval/(?P<env>.+)/reward/mean", "eval/{env}/avg@{k}"),
    (r"eval/(?P<env>.+)/completion_length/mean", "eval/{env}/completion_len/mean"),
    (r"eval/(?P<env>.+)/truncated", "eval/{env}/is_truncated/mean"),
)
"""PRIME-RL's names by patterns of our names with an environment; `k` is `evaluation.samplesPerTask`."""

DERIVED = (
    "batch/effective_batch_size",
    "kl_ent_ratio/mean",
    "perf/throughput_per_gpu",
    "progress/total_tokens",
    "progress/total_samples",
    "progress/total_problems",
    "progress/ckpt_step",
)
"""Metrics of PRIME-RL that are computed from a line and the lines before it."""

_TOTALS = (
    ("batch/tokens", "progress/total_tokens"),
    ("batch/rollouts", "progress/total_samples"),
    ("batch/groups", "progress/total_problems"),
)
_COMPILED = [(re.compile(pattern), layout) for pattern, layout in PATTERNS]


def tracked_name(name: str, *, samples_per_task: int = 1) -> tuple[str, float]:
    """Return the name of a metric in trackers, and the factor for its value."""
    if name in NAMES:
        return NAMES[name]
    for pattern, layout in _COMPILED:
        if (found := pattern.fullmatch(name)) is not None:
            return layout.format(**found.groupdict(), k=samples_per_task), 1.0
    return name, 1.0


class Translator:
    """Converter of `metrics.jsonl` to tracker metrics. Lines must be passed in order.

    Args:
        world_size: number of trainer ranks.
        samples_per_task: samples per task of evaluations.
    """

    def __init__(self, *, world_size: int, samples_per_task: int) -> None:
        self._world_size, self._k = world_size, samples_per_task
        self._totals: dict[str, float] = {}

    def translate_metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of one line, without `step`, `attempt` and `time`."""
        scalars = {}
        for name, value in values.items():
            new, factor = tracked_name(name, samples_per_task=self._k)
            scalars[new] = value * factor
        for name, total in _TOTALS:
            if name in values:
                self._totals[total] = self._totals.get(total, 0.0) + values[name]
        scalars |= self._totals | {"progress/ckpt_step": float(step)}
        if "batch/solve_all" in values and "batch/solve_none" in values:
            scalars["batch/effective_batch_size"] = 1 - values["batch/solve_all"] - values["batch/solve_none"]
        if values.get("entropy", 0.0) > 0 and "mismatch_kl" in values:
            scalars["kl_ent_ratio/mean"] = values["mismatch_kl"] / values["entropy"]
        if "perf/throughput" in values:
            scalars["perf/throughput_per_gpu"] = values["perf/throughput"] / self._world_size
        return scalars


@dataclass(frozen=True, order=True)
class Mark:
    """Identity of a line of `metrics.jsonl`: its step, and the attempt that trained the step."""

    step: int
    attempt: int


@dataclass(frozen=True)
class SampleRow:
    """One rollout in a table of samples."""

    environment: str
    task: str
    prompt: str
    completion: str
    reward: float | None
    advantage: float | None
    versions: str
    """Policy versions with which its tokens were sampled, such as `3, 4`."""

    COLUMNS = ("environment", "task", "prompt", "completion", "reward", "advantage", "versions")

    def row_values(self) -> list[object]:
        """Return the values in the order of `COLUMNS`."""
        return [getattr(self, name) for name in self.COLUMNS]


@dataclass(frozen=True)
class Record:
    """Data of one step."""

    mark: Mark
    time: float
    """Seconds since the epoch."""
    scalars: Mapping[str, float]
    histograms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples: Mapping[str, Sequence[SampleRow]] = field(default_factory=dict)
    """Tables by name."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers identify it."""

    uid: str
    """Id of the run in trackers, the same in all attempts."""
    name: str
    root: Path
    """The run's folder."""
    config: Mapping[str, object]
    """Resolved configuration of all roles."""
    max_steps: int

    @property
    def folder(self) -> Path:
        """Folder for all files of trackers on the volume."""
        return self.root / "tracking"


class TrackerError(Exception):
    """Error of a tracker. The worker ends and is restarted.

    Args:
        message: one line for users.
        permanent: whether a restart is useless, for example if a package is not installed.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Tracker(Protocol):
    """Interface of one tracker. Methods may raise, hang or kill the process: the next worker continues after the records that were kept."""

    def open(self, run: TrackedRun, sent: Sequence[Mark], confirmed: int) -> int:
        """Start or continue a run, after the records `sent`. The first `confirmed` of them were flushed.

        Returns:
            Number of records of `sent`, from the first, that the tracker has kept. The others are sent again.
        """
        ...

    def log(self, number: int, record: Record) -> None:
        """Send a record. `number` is its position in the run, from 0."""
        ...

    def flush(self) -> None:
        """Return after all records have left this process, so that its end cannot lose them."""
        ...

    def close(self, *, complete: bool) -> None:
        """Close the tracker. `complete` is True if the run has trained its last step."""
        ...
