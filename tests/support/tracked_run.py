"""A run's folder as its roles write it, line by line, for tests of trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.orchestrator.progress.metrics_file import append_line, write_jsonl
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.paths import RunPaths

UID = "11111111-2222-3333-4444-555555555555"


class TrackedFolder:
    """The folder of a run.

    Args:
        root: parent folder.
        trackers: the manifest's `tracking`.
        max_steps: number of steps of the run.
    """

    def __init__(self, root: Path, trackers: dict[str, Any], *, max_steps: int = 40) -> None:
        self.paths = RunPaths(root)
        document = {"model": {"tiny": {}}, "maxSteps": max_steps, "tracking": trackers}
        spec = RLRunSpec.model_validate(document | {"environments": [{"id": "reverse-text"}]})
        self.config: RunConfig = resolve_spec(spec, name="tracked", uid=UID, output_dir=str(root))
        write_bytes(self.paths.run_json, self.config.model_dump_json().encode())
        self.attempt = 1

    def step(self, step: int, **more: float) -> None:
        """Write a step's trace and its line."""
        row = {
            "attempt": self.attempt, "environment": "reverse-text", "task_id": "7", "completion": "cba", "completion_tokens": 3,
            "messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}],
            "versions": [[{"version": step - 1, "start": 0, "end": 3}]],
        }  # fmt: skip
        rows = [row | {"step": step, "reward": i / 4, "advantage": i / 4 - 0.375} for i in range(4)]
        write_jsonl(self.paths.trace(step), rows)
        line = {
            "step": step,
            "attempt": self.attempt,
            "time": 1.7e9 + step + 1e6 * self.attempt,
            "loss": loss(step, self.attempt),
        }
        append_line(self.paths.metrics, json.dumps({**line, "reward/mean": step / 100, "batch/tokens": 10.0, **more}))

    def begin(self, attempt: int, base_step: int) -> None:
        """Start an attempt as the orchestrator does: lines of steps after the base are removed."""
        self.attempt = attempt
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        write_jsonl(self.paths.metrics, [line for line in lines if line["step"] <= base_step])

    def expected(self) -> list[tuple[int, float]]:
        """Return the whole curve of the loss."""
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        return [(line["step"], line["loss"]) for line in lines]


def loss(step: int, attempt: int) -> float:
    """Return a value that float32 represents exactly, different in each attempt."""
    return step + attempt / 8
