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

from rlrun.pod.role_process import descendants
from rlrun.protocol.files.metrics_line import read_metrics
from tests.listening import listening
from tests.support.programs import finish, wait_for
from tests.support.python_path import before
from tests.support.waiting import StalledError

ROOT = Path(__file__).resolve().parents[3]
LEARNED_STEPS = 120
"""Steps of a run that has learned, as many as the example has: runs with three of four letters right stay there for a while."""
SHARED_STEPS = 40
"""Steps of the run that tests share (`small_quickstart`). Measured: after 36 its reward has risen from 0.53 to 0.74, its held-out
reward from 0.54 to 0.77."""


def processes_of(folder: Path) -> list[int]:
    """Pids of live processes whose command line or environment names `folder`."""
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
    """Addresses at which its processes listened when `note_listeners` was called."""
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
        """Wait for its end; the exit code."""
        assert self.process is not None
        try:
            self.output, _ = finish(self.process, progress=self._progress)
        except StalledError as error:
            pytest.fail(f"{error}\n{self.tails()}")
        return self.process.returncode

    def _progress(self) -> object:
        """Bytes of the logs and of the metrics."""
        files = [*self.folder.glob("logs/*/*/*.log"), self.folder / "metrics.jsonl"]
        return sum(file.stat().st_size for file in files if file.exists())

    def run(self, *options: str) -> None:
        """Run to the end and demand success."""
        self.start(*options)
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output}\n{self.tails()}"

    def note_listeners(self) -> None:
        """Add the addresses at which its processes listen to `listened`."""
        assert self.process is not None
        self.listened |= set(listening([self.process.pid, *descendants(self.process.pid)]))

    def stop(self) -> None:
        """End it if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(StalledError):  # its processes are killed then
                self.output, _ = finish(self.process)

    def tails(self) -> str:
        """The last lines of every log."""
        logs = sorted(self.folder.glob("logs/*/*/*.log"))
        return "\n".join(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) for log in logs)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are whole: the run may be writing the last one."""
        return read_metrics(self.folder / "metrics.jsonl")[0]

    def steps(self) -> list[dict[str, Any]]:
        """The lines of trained steps."""
        return [line for line in self.metrics() if line["step"] > 0]

    def rewards(self) -> list[float]:
        """Mean reward of every step."""
        return [line["reward/mean"] for line in self.steps()]

    def held_out(self, environment: str = "reverse-text") -> list[tuple[int, float]]:
        """Policy version and mean held-out reward."""
        key = f"eval/{environment}/reward/mean"
        return [(line["step"], line[key]) for line in self.metrics() if key in line]

    def traces(self) -> list[dict[str, Any]]:
        """All rollouts that were trained on."""
        return [
            json.loads(line)
            for path in sorted(self.folder.glob("traces/step_*.jsonl"))
            for line in path.read_text().splitlines()
        ]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait while the run continues."""
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
    """True if somebody accepts connections there; fails if the process has ended."""
    assert process.poll() is None, log.read_text()
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def quickstart(**changes: Any) -> dict[str, Any]:
    """The quickstart's manifest with top-level fields of its spec replaced, or merged where both are mappings."""
    return example("quickstart", **changes)


def small_quickstart(**changes: Any) -> dict[str, Any]:
    """The quickstart's manifest, changed like `quickstart`, with a model that learns as much in a third of the steps and of the CPU time.

    The model has two layers, for which a batch of half the size and twice the learning rate are enough. At the full rate the first steps
    would unlearn something.
    """
    document = quickstart(**changes)
    spec = document["spec"]
    if "tiny" in spec["model"]:
        spec["model"]["tiny"]["layers"] = 2
    spec["orchestrator"]["batchSize"] = 128
    spec["trainer"] |= {"optimizer": {"lr": 3e-4}, "scheduler": {"warmupSteps": 5}}
    return document


def example(name: str, **changes: Any) -> dict[str, Any]:
    """An example's manifest, changed like `quickstart`; `model_folder` takes the place of its model."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    spec = document["spec"]
    if (folder := changes.pop("model_folder", None)) is not None:
        spec["model"] = {"path": str(folder), "dtype": spec["model"]["dtype"]}
    for key, value in changes.items():
        spec[key] = {**spec[key], **value} if isinstance(value, dict) and isinstance(spec.get(key), dict) else value
    return document
