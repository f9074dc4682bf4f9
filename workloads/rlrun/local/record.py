"""Writer of the launcher's record: the progress of a run and the way it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlrun.local.supervisor import Running
from rlrun.protocol.files.launcher import BEAT_SECONDS, State, new_record, write_record


class Recorder:
    """Writer of one attempt's `launcher.json`.

    Args:
        path: path of the file.
        name: name of the run.
        attempt: number of the attempt.
        command: command that continues the run.
        gpus: number of GPUs of each role.
        use: function that returns the current usage of each role's GPUs.
        clock: function that returns seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        attempt: int,
        command: str,
        gpus: Mapping[str, int] | None = None,
        use: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._clock, self._use = path, clock, use
        self._record = new_record(name, attempt, command, gpus)
        self._written = 0.0

    def beat(self, progress: Mapping[str, Any] | None) -> None:
        """Record the current progress, and write it at most every two seconds. None: the orchestrator does not answer."""
        now = self._clock()
        if progress:
            self._record = replace(self._record, progress=progress, progress_time=now)
        if now - self._written >= BEAT_SECONDS:
            self._write(now)

    def end(self, state: State, failed: Running | None = None) -> None:
        """Write the final state of the attempt."""
        role, code = (failed.spec.name, failed.process.returncode) if failed is not None else (None, None)
        self._record = replace(self._record, state=state, failed_role=role, exit_code=code)
        self._write(self._clock())

    def _write(self, now: float) -> None:
        self._record = replace(self._record, time=now, gpu_use=self._use())
        write_record(self._path, self._record)
        self._written = now
