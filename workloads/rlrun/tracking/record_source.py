"""Records of the run's folder: lines of `metrics.jsonl`, with traces and machine measures of each step.

Measures of this machine are in `tracking/system.jsonl`, one line every 30 s. The workers add them to the steps' metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.config.models.run_config import RunConfig
from rlrun.config.models.trackers import TrackedSamplesConfig
from rlrun.protocol.files.metrics_line import Lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.tracking.tracker_records import Mark, Record, SampleRow, Translator

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

    def read_measures(self) -> dict[str, float]:
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
        return found | self._gpu_measures()

    def _gpu_measures(self) -> dict[str, float]:
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


_NOT_METRICS = ("step", "attempt", "time")
_TEXT_CHARACTERS = 4000
"""Longest part of a prompt or completion that is sent, in characters."""
_CHUNK_BYTES = 1024 * 1024
SYSTEM_FILE = "system.jsonl"


class Source:
    """Records of a run's folder after those that were sent.

    Args:
        config: configuration of the run.
        sent: marks of the sent records, in order.
    """

    def __init__(self, config: RunConfig, sent: Sequence[Mark]) -> None:
        self._config, self._paths = config, RunPaths(Path(config.trainer.output_dir))
        self._samples = (config.tracking.samples if config.tracking else None) or TrackedSamplesConfig()
        self._lines = Lines(self._paths.metrics)
        self._system = Lines(self._paths.root / "tracking" / SYSTEM_FILE)
        self._measures: list[dict[str, float]] = []
        self._last = sent[-1] if sent else None
        self._translator = self._new_translator()
        self._before = 0.0
        """Time of the previous line."""

    def _new_translator(self) -> Translator:
        evaluation = self._config.orchestrator.evaluation
        return Translator(
            world_size=self._config.trainer.world_size,
            samples_per_task=evaluation.samples_per_task if evaluation else 1,
        )

    def read_records(self) -> Iterator[Record]:
        """Yield new records. A step that a later attempt trains again is yielded again.

        Attempts ascend from line to line. A line is new if its attempt is later than the newest sent one, or if the attempt is the same and
        its step is later.
        """
        self._measures += [_line_numbers(line) for line in self._system.new()[1]]
        for line in self._new_lines():
            mark = Mark(_read_whole(line.get("step")), _read_whole(line.get("attempt")))
            numbers = _line_numbers(line)
            values = {name: value for name, value in numbers.items() if name not in _NOT_METRICS}
            scalars = self._translator.translate_metrics(mark.step, values)
            time = numbers.get("time", 0.0)
            system = self._mean_measures(self._before, time)
            self._before = time or self._before
            if self._last is not None and mark.step <= self._last.step and mark.attempt <= self._last.attempt:
                continue
            self._last = mark
            scalars |= system | {"progress/attempt": float(mark.attempt)}
            yield Record(mark, time, scalars, *self._read_traces(mark, evaluated=_is_evaluated(line)))

    def _new_lines(self) -> Iterator[Mapping[str, object]]:
        """Yield new lines of the metrics, read in chunks. After a restart all lines are new."""
        while True:
            before = self._lines.offset
            replaced, lines = self._lines.new(_CHUNK_BYTES)
            if replaced:
                self._translator, self._before = self._new_translator(), 0.0
            yield from lines
            if self._lines.offset == before:
                return

    def _mean_measures(self, after: float, until: float) -> dict[str, float]:
        """Return the means of the machine's measures between two lines, and drop these measures."""
        own = [m for m in self._measures if after < m.get("time", 0.0) <= until]
        self._measures = [m for m in self._measures if m.get("time", 0.0) > until]
        names = dict.fromkeys(name for m in own for name in m if name != "time")
        values = {name: [m[name] for m in own if name in m] for name in names}
        return {name: sum(found) / len(found) for name, found in values.items()}

    def _read_traces(
        self, mark: Mark, *, evaluated: bool
    ) -> tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[SampleRow]]]:
        """Return histograms and samples of a step."""
        histograms: dict[str, list[float]] = {}
        samples: dict[str, list[SampleRow]] = {}
        if mark.step > 0 and mark.step % self._samples.interval == 0:
            rows = [
                row
                for row in _read_trace(self._paths.trace(mark.step))
                if row.get("attempt", mark.attempt) == mark.attempt
            ]
            for name, field in (
                ("distributions/rewards", "reward"),
                ("distributions/advantages", "advantage"),
                ("distributions/completion_len", "completion_tokens"),
            ):
                if values := [value for row in rows if (value := _read_number(row.get(field))) is not None]:
                    histograms[name] = values
            samples["samples"] = self._select_rows(rows)
        if evaluated:
            samples["eval_samples"] = self._select_rows(_read_trace(self._paths.evaluation_trace(mark.step)))
        return histograms, {name: rows for name, rows in samples.items() if rows}

    def _select_rows(self, rows: Sequence[dict[str, object]]) -> list[SampleRow]:
        """Select rows at equal distances, so that all environments of a trace are represented."""
        count = min(self._samples.count, len(rows))
        return [_read_sample(rows[i * len(rows) // count]) for i in range(count)]


def _is_evaluated(line: Mapping[str, object]) -> bool:
    return any(name.startswith("eval/") for name in line)


def _read_whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _read_trace(path: Path) -> list[dict[str, object]]:
    """Rows of a trace, or an empty list if the volume could not write or read it."""
    try:
        return Lines(path).new()[1]
    except OSError:
        return []


def _read_sample(row: Mapping[str, object]) -> SampleRow:
    messages = row.get("messages")
    shown = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    prompt = [m for m in shown if m.get("role") != "assistant"]
    replies = row.get("versions")
    spans = (
        [span for reply in replies if isinstance(reply, list) for span in reply] if isinstance(replies, list) else []
    )
    versions = sorted({_read_whole(span.get("version")) for span in spans if isinstance(span, dict)})
    return SampleRow(
        environment=str(row.get("environment", "")),
        task=str(row.get("task_id", "")),
        prompt="\n".join(f"{m.get('role')}: {_shown_content(m)}" for m in prompt)[:_TEXT_CHARACTERS],
        completion=str(row.get("completion", ""))[:_TEXT_CHARACTERS],
        reward=_read_number(row.get("reward")),
        advantage=_read_number(row.get("advantage")),
        versions=", ".join(map(str, versions)),
    )


def _shown_content(message: Mapping[str, object]) -> str:
    """Text of a message. Other content is shown as JSON."""
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _line_numbers(line: Mapping[str, object]) -> dict[str, float]:
    """Numeric values of a line, by name."""
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def _read_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
