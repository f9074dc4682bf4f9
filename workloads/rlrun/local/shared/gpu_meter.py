"""Usage of a run's GPUs on this machine, for the launcher's record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlrun.protocol.files.gpu_use import GpuUse, mean_share, use_document
from rlrun.runtime.nvml import IDLE_BELOW, SAMPLE_SECONDS, Gpus, Sample, gpus_here

Ids = Sequence[int | str]


class GpuMeter:
    """Thread that samples the GPUs of each role until `close`. Without NVML there are no samples, and no error.

    Args:
        roles: GPUs of each role, by index or UUID.
        gpus: function that opens a role's GPUs. It is called in the thread, because a driver may take seconds to answer.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        roles: Mapping[str, Ids],
        gpus: Callable[[Ids], Gpus | None] = gpus_here,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._closed = clock, threading.Event()
        self._use: Mapping[str, GpuUse] = {}
        self._idle: dict[str, tuple[float, float]] = {}
        """Idle GPU-seconds and all sampled GPU-seconds of each role."""
        wanted = {role: ids for role, ids in roles.items() if ids}
        if wanted:
            threading.Thread(target=self._run, args=(wanted, gpus), name="gpus", daemon=True).start()

    def _run(self, roles: Mapping[str, Ids], gpus: Callable[[Ids], Gpus | None]) -> None:
        sources = {role: source for role, ids in roles.items() if (source := gpus(ids)) is not None}
        before = self._clock()
        while sources and not self._closed.wait(SAMPLE_SECONDS):
            with suppress(Exception):  # a broken driver affects only these numbers
                samples, now = {role: source.sample() for role, source in sources.items()}, self._clock()
                self.note(samples, now - before)
                before = now

    def note(self, samples: Mapping[str, Sequence[Sample]], seconds: float) -> None:
        """Add samples.

        Args:
            samples: samples of each role's GPUs.
            seconds: time since the previous samples.
        """
        self._use = {role: self._update_use(role, found, seconds) for role, found in samples.items() if found}

    def _update_use(self, role: str, samples: Sequence[Sample], seconds: float) -> GpuUse:
        utilizations = [sample.utilization for sample in samples if sample.utilization is not None]
        idle, total = self._idle.get(role, (0.0, 0.0))
        idle, total = (
            idle + seconds * sum(one < IDLE_BELOW for one in utilizations),
            total + seconds * len(utilizations),
        )
        self._idle[role] = idle, total
        used, size = sum(one.used_bytes for one in samples), sum(one.size_bytes for one in samples)
        return GpuUse(len(samples), mean_share(utilizations), used, size, idle / total if total else None)

    def document(self) -> dict[str, Any]:
        """Return the last samples by role, in the format of the record."""
        return {role: use_document(use) for role, use in self._use.items()}

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()
