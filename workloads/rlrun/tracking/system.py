"""Measures of this machine in `tracking/system.jsonl`, one line every 30 s, which the workers add to the steps' metrics."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

GIB = 2**30
INTERVAL_SECONDS = 30.0
_GPU_QUERY = "utilization.gpu,memory.used,power.draw,temperature.gpu"
_GPU_NAMES = ("utilization_percent", "memory_used_gib", "power_watts", "temperature_celsius")
_GPU_SECONDS = 5.0


class Machine:
    """Measures of processors, memory, GPUs and the run's volume.

    Args:
        root: folder of the run.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._busy, self._total = _processor_times()
        self._has_gpus = shutil.which("nvidia-smi") is not None

    def measure(self) -> dict[str, float]:
        """Return values by name, `system/...`. The processors' load is measured since the last call. Unavailable values are left out."""
        found: dict[str, float] = {}
        with suppress(OSError, ValueError, IndexError, KeyError):
            busy, total = _processor_times()
            if total > self._total:
                found["system/cpu_percent"] = 100 * (busy - self._busy) / (total - self._total)
            self._busy, self._total = busy, total
            memory = _read_memory()
            found["system/memory_used_gib"] = (memory["MemTotal"] - memory["MemAvailable"]) / GIB
            found["system/memory_total_gib"] = memory["MemTotal"] / GIB
            found["system/disk_free_gib"] = shutil.disk_usage(self._root).free / GIB
            found["system/load"] = os.getloadavg()[0]
        return found | self._gpus()

    def _gpus(self) -> dict[str, float]:
        if not self._has_gpus:
            return {}
        command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        return gpu_measures(output)


def gpu_measures(output: str) -> dict[str, float]:
    """Parse the output of `nvidia-smi`: one line per GPU, memory in MiB. Values that are not numbers are left out."""
    found: dict[str, float] = {}
    for gpu, line in enumerate(output.splitlines()):
        for name, text in zip(_GPU_NAMES, line.split(","), strict=False):
            with suppress(ValueError):
                found[f"system/gpu.{gpu}.{name}"] = float(text) / (1024 if name == "memory_used_gib" else 1)
    return found


def _processor_times() -> tuple[float, float]:
    """Busy and total ticks of all processors since the machine's start."""
    times = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)


def _read_memory() -> dict[str, int]:
    """Values of /proc/meminfo in bytes, by name."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 2}
