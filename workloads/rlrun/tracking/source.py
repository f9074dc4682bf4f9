"""Contents of the volume as records: `metrics.jsonl` with the traces and the machine's measures that belong to a step. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlrun.config.models.run import RunConfig
from rlrun.config.models.tracking import TrackedSamplesConfig
from rlrun.protocol.files.growing_lines import Lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.tracking.names import Translator
from rlrun.tracking.record import Mark, Record, SampleRow

_NOT_METRICS = ("step", "attempt", "time")
_TEXT_CHARACTERS = 4000
"""Most characters of a prompt or a completion that are sent."""
_CHUNK_BYTES = 1024 * 1024
SYSTEM_FILE = "system.jsonl"


class Source:
    """Records of a run's folder that follow what was sent.

    Args:
        config: the run's.
        sent: what the tracker has, in order.
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
        """Time of the line before."""

    def _new_translator(self) -> Translator:
        evaluation = self._config.orchestrator.evaluation
        return Translator(
            world_size=self._config.trainer.world_size,
            samples_per_task=evaluation.samples_per_task if evaluation else 1,
        )

    def records(self) -> Iterator[Record]:
        """Records that are new. A step that a later attempt has trained again comes again.

        Attempts ascend from line to line: a line of a later attempt than the newest one sent was written after it, and a line of the
        same attempt is new if its step is later.
        """
        self._measures += [_line_numbers(line) for line in self._system.new()[1]]
        for line in self._new_lines():
            mark = Mark(_read_whole(line.get("step")), _read_whole(line.get("attempt")))
            numbers = _line_numbers(line)
            values = {name: value for name, value in numbers.items() if name not in _NOT_METRICS}
            scalars = self._translator.translate(mark.step, values)
            time = numbers.get("time", 0.0)
            system = self._measured(self._before, time)
            self._before = time or self._before
            if self._last is not None and mark.step <= self._last.step and mark.attempt <= self._last.attempt:
                continue
            self._last = mark
            scalars |= system | {"progress/attempt": float(mark.attempt)}
            yield Record(mark, time, scalars, *self._of_traces(mark, evaluated=_is_evaluated(line)))

    def _new_lines(self) -> Iterator[Mapping[str, object]]:
        """New lines of the metrics, read in chunks: all of them after a restart."""
        while True:
            before = self._lines.offset
            replaced, lines = self._lines.new(_CHUNK_BYTES)
            if replaced:
                self._translator, self._before = self._new_translator(), 0.0
            yield from lines
            if self._lines.offset == before:
                return

    def _measured(self, after: float, until: float) -> dict[str, float]:
        """Means of the machine's measures between two lines; those that are used up are dropped."""
        own = [m for m in self._measures if after < m.get("time", 0.0) <= until]
        self._measures = [m for m in self._measures if m.get("time", 0.0) > until]
        names = dict.fromkeys(name for m in own for name in m if name != "time")
        values = {name: [m[name] for m in own if name in m] for name in names}
        return {name: sum(found) / len(found) for name, found in values.items()}

    def _of_traces(
        self, mark: Mark, *, evaluated: bool
    ) -> tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[SampleRow]]]:
        """Histograms and samples of a step."""
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
            samples["samples"] = self._chosen(rows)
        if evaluated:
            samples["eval_samples"] = self._chosen(_read_trace(self._paths.evaluation_trace(mark.step)))
        return histograms, {name: rows for name, rows in samples.items() if rows}

    def _chosen(self, rows: Sequence[dict[str, object]]) -> list[SampleRow]:
        """Rows at equal distances, so that all environments of a trace have some."""
        count = min(self._samples.count, len(rows))
        return [_read_sample(rows[i * len(rows) // count]) for i in range(count)]


def _is_evaluated(line: Mapping[str, object]) -> bool:
    return any(name.startswith("eval/") for name in line)


def _read_whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _read_trace(path: Path) -> list[dict[str, object]]:
    """Rows of a trace; none where the volume refused it, or does now."""
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
    """Text of a message; content that is not text as JSON."""
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _line_numbers(line: Mapping[str, object]) -> dict[str, float]:
    """Numbers of a line, by name."""
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def _read_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
