"""Records of the complete run: one JSON line per event, goals with their results, and samples of the GPU."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Report

GOALS = "goals"
NOT_RUN = "not run"
SAMPLE_SECONDS = 0.1
IDLE_BELOW = 0.05
AWAKE_SHARE = 0.9
"""Share of its largest memory above which an engine counts as awake."""
MIB = 2**20


class Events:
    """Events and goals of one output folder: `events.jsonl`, `run.json` and `run.md`.

    Args:
        folder: output folder, which is created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._began = folder / "events.jsonl", time.monotonic()
        self._file.write_text("")
        self.report = Report(folder, "run", "A complete run on one GPU", fresh=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def add(self, event: str, **values: Any) -> None:
        """Append one event; it is on the disk when the call returns."""
        line = json.dumps({"seconds": round(self.seconds, 3), "event": event, **values})
        with self._file.open("a") as opened:
            opened.write(line + "\n")
        print(line, flush=True)

    def put_row(self, section: str, row: str, values: Mapping[str, Any]) -> None:
        """Add a row to a table, and the same values as an event."""
        self.report.put(section, row, values)
        self.add("row", section=section, row=row, **values)

    def put_goal(self, name: str, value: float | None, at_most: float | None = None, **options: Any) -> None:
        """Add the result of a goal.

        Args:
            name: name of the goal.
            value: measured value. None: it was not measured.
            at_most: largest value that meets the goal.
            options: `at_least`, the smallest value that meets the goal; `unit`; `note`, which is required without a value.
        """
        at_least = options.get("at_least")
        row: dict[str, Any] = {
            "value": value,
            "unit": options.get("unit", ""),
            "goal": describe_goal(at_most, at_least),
        }
        row["result"] = judge_value(value, at_most, at_least)
        if value is None and not options.get("note"):
            raise ValueError(f"goal {name!r} has no value; pass a note with the reason")
        if options.get("note"):
            row["note"] = options["note"]
        self.put_row(GOALS, name, row)


def describe_goal(at_most: float | None, at_least: float | None) -> str:
    """Return a goal as text."""
    if at_most is not None:
        return f"<= {at_most:g}"
    return f">= {at_least:g}" if at_least is not None else "none: stated"


def judge_value(value: float | None, at_most: float | None, at_least: float | None) -> str:
    """Return `met`, `missed`, `stated` (there is no goal) or `not run`. A value that is not a number misses its goal."""
    if value is None:
        return NOT_RUN
    if at_most is None and at_least is None:
        return "stated"
    met = value <= at_most if at_most is not None else value >= (at_least or 0.0)
    return "met" if met else "missed"


@dataclass(frozen=True)
class GpuSample:
    """State of the GPU at one time of `time.monotonic`, in seconds."""

    time: float
    utilization: float | None
    used_bytes: int
    by_process: Mapping[int, int]
    """Bytes of each process that the driver shows."""


class GpuSampler:
    """Thread that samples GPU 0 every 100 ms. Without NVML there are no samples."""

    def __init__(self) -> None:
        self.samples: list[GpuSample] = []
        self.problem = "NVML has no sample yet"
        """Reason why there are no samples, as text; "" if there are."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample_gpu, name="gpu", daemon=True)
        self._thread.start()

    def _sample_gpu(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception as error:  # no package, no driver or no GPU
            self.problem = f"NVML cannot be used: {type(error).__name__}: {error}"[:200]
            return
        while not self._closed.wait(SAMPLE_SECONDS):
            with suppress(pynvml.NVMLError):
                used, utilization, by_process = int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used), None, {}
                with suppress(pynvml.NVMLError):
                    utilization = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
                with suppress(pynvml.NVMLError):
                    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
                    by_process = {one.pid: int(one.usedGpuMemory or 0) for one in processes}
                self.samples.append(GpuSample(time.monotonic(), utilization, used, by_process))
                self.problem = ""

    def between(self, start: float, end: float) -> list[GpuSample]:
        """Return the samples of a time span."""
        return [sample for sample in self.samples if start <= sample.time <= end]

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()
        self._thread.join()


def idle_seconds(samples: Sequence[GpuSample]) -> float | None:
    """Return the seconds in which the GPU was idle, or None without samples of its use."""
    known = [sample.utilization for sample in samples if sample.utilization is not None]
    if not known:
        return None
    span = samples[-1].time - samples[0].time
    return span * sum(value < IDLE_BELOW for value in known) / len(known)


def memory_row(samples: Sequence[GpuSample]) -> dict[str, float]:
    """Return the smallest, median and largest used memory, in MiB."""
    used = sorted(sample.used_bytes / MIB for sample in samples)
    return {"least MiB": used[0], "median MiB": used[len(used) // 2], "most MiB": used[-1]} if used else {}


def sleeping_engine_bytes(samples: Sequence[GpuSample], end: float) -> tuple[int | None, str]:
    """Return the memory of a colocated run's sleeping engine and how it was found, or None and the reason.

    The process that once has the most memory is the engine: it allocates its share of the GPU when it wakes up. The value is
    its least memory after it first had nearly the most. A driver that shows no processes, as in a container, leaves an upper
    bound: the least memory of the whole GPU, which includes the trainer's context, minus that before the run.

    Args:
        samples: samples of the run.
        end: time of the last step, in seconds: a process that ends also frees its memory.
    """
    samples = [sample for sample in samples if sample.time <= end]
    if not samples:
        return None, "no samples of a GPU"
    peaks: dict[int, int] = {}
    for sample in samples:
        for pid, used in sample.by_process.items():
            peaks[pid] = max(peaks.get(pid, 0), used)
    if any(peaks.values()):
        engine = max(peaks, key=lambda pid: peaks[pid])
        series = [sample.by_process[engine] for sample in samples if engine in sample.by_process]
        how = "least memory of the process with the most, after it first was awake"
    else:
        series = [sample.used_bytes - samples[0].used_bytes for sample in samples]
        how = "upper bound, because NVML shows no processes: least memory of the GPU after that, without that before the run"
    awake = next(index for index, used in enumerate(series) if used >= AWAKE_SHARE * max(series))
    return min(series[awake:]), how


def describe_machine() -> dict[str, Any]:
    """Return the versions and the device, for the first event."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "processors": os.cpu_count(),
    }
