"""Durations of the parts of a step on the device, read at the end of the step."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Marks between parts of a step. On CUDA they are events in the stream, so that the host does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Mark the end of a part and the start of the next one."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between successive marks; on CUDA wait until the device has reached the last one."""
        if self._events:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
