"""Records for trackers, one per line of `metrics.jsonl`, and the interface of a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


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

    def cells(self) -> list[object]:
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
