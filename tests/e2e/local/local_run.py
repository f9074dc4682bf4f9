"""One `rlrun local` under test, and its folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.pod.role_process import descendant_pids
from rlrun.protocol.files.metrics_line import read_metrics
from tests.listening import listening
from tests.support.programs import finish, wait_for
from tests.support.python_path import before
from tests.support.waiting import StalledError

ROOT = Path(__file__).resolve().parents[3]
LEARNED_STEPS = 120
"""Steps of a run that has learned, as many as in the example: runs with three of four correct letters stay there for a
while.
"""
SHARED_STEPS = 40
"""Steps of the shared run (`small_quickstart`). Measured: after 36 steps its reward has increased from 0.53 to 0.74
and its held-out reward from 0.54 to 0.77.
"""


def processes_of(folder: Path) -> list[int]:
    """Return the pids of live processes whose command line or environment names `folder`."""
    mark = str(folder).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@dataclass
class LocalRun:
    """One `rlrun local` and its folder."""

    manifest: Path
    folder: Path
    output: str = ""
    process: subprocess.Popen[str] | None = None
    listened: set[str] = field(default_factory=set)
    """Listening addresses of its processes, recorded by `note_listeners`."""
    _options: list[str] = field(default_factory=list)

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start it in the background."""
        command = [
            sys.executable,
            "-m",
            "rlrun.cli.main",
            "local",
            str(self.manifest),
            "--output-dir",
            str(self.folder),
            "--plain",
        ]
        environment = {**os.environ, "PYTHONPATH": before(ROOT)}
        self.process = subprocess.Popen(
            [*command, *options], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return self.process

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        assert self.process is not None
        try:
            self.output, _ = finish(self.process, progress=self._progress)
        except StalledError as error:
            pytest.fail(f"{error}\n{self.tails()}")
        return self.process.returncode

    def _progress(self) -> object:
        """Return the sizes of the logs and of the metrics in bytes."""
        files = [*self.folder.glob("logs/*/*/*.log"), self.folder / "metrics.jsonl"]
        return sum(file.stat().st_size for file in files if file.exists())

    def run(self, *options: str) -> None:
        """Run to the end and require success."""
        self.start(*options)
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output}\n{self.tails()}"

    def note_listeners(self) -> None:
        """Add the listening addresses of its processes to `listened`."""
        assert self.process is not None
        self.listened |= set(listening([self.process.pid, *descendant_pids(self.process.pid)]))

    def stop(self) -> None:
        """End it if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(StalledError):  # its processes are killed afterwards
                self.output, _ = finish(self.process)

    def tails(self) -> str:
        """Return the last lines of every log."""
        logs = sorted(self.folder.glob("logs/*/*/*.log"))
        return "\n".join(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) for log in logs)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl; the run may still write the last one."""
        return read_metrics(self.folder / "metrics.jsonl")[0]

    def steps(self) -> list[dict[str, Any]]:
        """Return the metric lines of trained steps."""
        return [line for line in self.metrics() if line["step"] > 0]

    def rewards(self) -> list[float]:
        """Return the mean reward of every step."""
        return [line["reward/mean"] for line in self.steps()]

    def held_out(self, environment: str = "reverse-text") -> list[tuple[int, float]]:
        """Return policy version and mean held-out reward of each evaluation."""
        key = f"eval/{environment}/reward/mean"
        return [(line["step"], line[key]) for line in self.metrics() if key in line]

    def traces(self) -> list[dict[str, Any]]:
        """Return all trained rollouts."""
        return [
            json.loads(line)
            for path in sorted(self.folder.glob("traces/step_*.jsonl"))
            for line in path.read_text().splitlines()
        ]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition while the run continues."""
        assert self.process is not None
        process = self.process

        def is_true() -> bool:
            if condition():
                return True
            if process.poll() is not None:
                self.wait()
                pytest.fail(f"the run ended before: {what}\n{self.output}\n{self.tails()}")
            return False

        try:
            wait_for(is_true, what, progress=self._progress, state=self.tails)
        except StalledError:
            self.stop()
            raise


def listens(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    """Whether the port accepts connections; fails if the process has ended."""
    assert process.poll() is None, log.read_text()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def mean(values: list[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def quickstart(**changes: Any) -> dict[str, Any]:
    """Return the quickstart's manifest with replaced top-level fields of its spec; mappings are merged."""
    return example("quickstart", **changes)


def small_quickstart(**changes: Any) -> dict[str, Any]:
    """Return the quickstart's manifest, changed like `quickstart`, with a model that needs a third of the steps and
    CPU time.

    The model has two layers, so half of the batch size and twice the learning rate are enough. The first steps have a
    warm-up, because the full rate would reduce the reward at first.
    """
    document = quickstart(**changes)
    spec = document["spec"]
    if "tiny" in spec["model"]:
        spec["model"]["tiny"]["layers"] = 2
    spec["orchestrator"]["batchSize"] = 128
    spec["trainer"] |= {"optimizer": {"lr": 3e-4}, "scheduler": {"warmupSteps": 5}}
    return document


def example(name: str, **changes: Any) -> dict[str, Any]:
    """Return an example's manifest, changed like `quickstart`; `model_folder` replaces its model."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    spec = document["spec"]
    if (folder := changes.pop("model_folder", None)) is not None:
        spec["model"] = {"path": str(folder), "dtype": spec["model"]["dtype"]}
    for key, value in changes.items():
        spec[key] = {**spec[key], **value} if isinstance(value, dict) and isinstance(spec.get(key), dict) else value
    return document
