"""Times of a step's parts on its device, read when the step is over."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Marks between parts of a step. On CUDA they are events in the stream: the host is ahead of the device and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Note that a part ends here and the next begins."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Duration of each part between two marks; on CUDA only after the device has passed the last one."""
        if self._events:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
