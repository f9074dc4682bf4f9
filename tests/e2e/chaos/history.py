"""History of a run in its status, its training log and its checkpoints, recorded while it runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.cluster import ClusterError
from tests.e2e.chaos.chaos_run import ChaosRun

LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Trained:
    """One line of `metrics.jsonl`."""

    step: int
    attempt: int
    time: float


class History:
    """Thread that follows a run by its folder on the host and by small requests to the API server."""

    def __init__(self, run: ChaosRun) -> None:
        self.folder = run.folder()
        self._run = run
        self.statuses: list[tuple[float, dict[str, Any]]] = []
        """Each changed status with the time at which it was read."""
        self.seen: dict[tuple[int, int], Trained] = {}
        """Every line that ever existed: a resumed attempt removes the lines of lost steps."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"history {run.name}", daemon=True)

    def __enter__(self) -> History:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def lines(self) -> list[Trained]:
        """Return the present lines of `metrics.jsonl`."""
        with suppress(FileNotFoundError):
            whole, _, _ = (self.folder / "metrics.jsonl").read_text().rpartition("\n")
            return [
                Trained(int(line["step"]), int(line["attempt"]), float(line["time"]))
                for line in map(json.loads, whole.splitlines())
            ]
        return []

    def newest_checkpoint(self, attempt: int) -> int:
        """Return the step of the newest checkpoint with a manifest in attempts up to this one; 0 without one."""
        found = (path.parent.name for path in self.folder.glob("checkpoints/step_*/manifest.json"))
        return max((int(name[5:13]) for name in found if int(name.partition(".a")[2]) <= attempt), default=0)

    def _follow(self) -> None:
        while not self._over.is_set():
            for line in self.lines():
                self.seen.setdefault((line.step, line.attempt), line)
            with suppress(ClusterError):
                status = self._run.status()
                if not self.statuses or self.statuses[-1][1] != status:
                    self.statuses.append((time.time(), status))
            self._over.wait(LOOK_SECONDS)

    def first_status_time(self, says: Callable[[dict[str, Any]], bool], after: float) -> float | None:
        """Return the time of the first status after a moment that satisfies a predicate."""
        return next((at for at, status in self.statuses if at >= after and says(status)), None)

    def failure_seen(self, attempt: int, after: float) -> float | None:
        """Return the time at which the end of an attempt was first recorded."""
        return self.first_status_time(lambda status: (status.get("lastFailure") or {}).get("attempt") == attempt, after)
