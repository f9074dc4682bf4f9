"""Values that a tracker gets: one record per line of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, order=True)
class Mark:
    """A line of `metrics.jsonl`: a step, and the attempt that has trained it."""

    step: int
    attempt: int


@dataclass(frozen=True)
class SampleRow:
    """One rollout for people."""

    environment: str
    task: str
    prompt: str
    completion: str
    reward: float | None
    advantage: float | None
    versions: str
    """Policy versions that its tokens were sampled with, such as `3, 4`."""

    COLUMNS = ("environment", "task", "prompt", "completion", "reward", "advantage", "versions")

    def cells(self) -> list[object]:
        """Values in the order of `COLUMNS`."""
        return [getattr(self, name) for name in self.COLUMNS]


@dataclass(frozen=True)
class Record:
    """A step."""

    mark: Mark
    time: float
    """Seconds since the epoch."""
    scalars: Mapping[str, float]
    histograms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples: Mapping[str, Sequence[SampleRow]] = field(default_factory=dict)
    """Tables by name."""


@dataclass(frozen=True)
class TrackedRun:
    """Identity of a run in a tracker."""

    uid: str
    """Id of the tracked run: the same in all attempts."""
    name: str
    root: Path
    """The run's folder."""
    config: Mapping[str, object]
    """The resolved configuration of all roles."""
    max_steps: int

    @property
    def folder(self) -> Path:
        """Folder of everything that trackers write on the volume."""
        return self.root / "tracking"


class TrackerError(Exception):
    """A tracker that cannot take what it is sent, in words for people; the worker ends and is started again.

    Args:
        message: one line.
        permanent: starting again cannot help, such as with a package that is not installed.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Tracker(Protocol):
    """One tracker. Every method may raise, hang or kill the process: the worker starts again from what is `kept`."""

    def open(self, run: TrackedRun, sent: Sequence[Mark], confirmed: int) -> int:
        """Begin, or go on, after the records `sent`, of which `confirmed` were flushed.

        Returns:
            How many of `sent`, from the first, the tracker has kept; the others are sent again.
        """
        ...

    def log(self, number: int, record: Record) -> None:
        """Send a record; `number` counts the records of the run from 0."""
        ...

    def flush(self) -> None:
        """Return once everything so far is out of this process's hands."""
        ...

    def close(self, *, complete: bool) -> None:
        """End; `complete` if the run has trained its last step."""
        ...
