"""Run of stub processes on loopback, one attempt after the other."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlrun
from rlrun.config.models.roles import micro_batch_tokens
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.metrics_line import read_metrics
from rlrun.protocol.files.paths import RunPaths
from tests.support.forks import Forked, Forks
from tests.support.programs import wait_for

ROOT = Path(__file__).parents[4]
WITHOUT_TORCH, FAULTS = Path(__file__).parent / "without_torch", ROOT / "tests/support/faults"
IMPORT_PATH = ":".join(map(str, (WITHOUT_TORCH, FAULTS, ROOT, Path(rlrun.__file__).parents[1])))
API_KEY = "a-key-of-this-run"
FAULT_POINTS = "FAULT_POINTS"
"""Environment variable that a program reads at its start, before all imports."""
Program = subprocess.Popen[bytes] | Forked
IMPORTED = (
    "rlrun.orchestrator.main",
    "rlrun.orchestrator.rl_pipeline",
    "tests.support.stub.inference",
    "tests.support.stub.loop",
    "tests.support.stub.model",
    "tests.support.stub.trainer",
)
"""Modules of stub runs. A program uses about one second of CPU time for its imports, more than for a run of thirty steps."""


@functools.cache
def stub_forks() -> Forks:
    """Return the process that has imported these modules; it starts at the first call and ends with the session."""
    forks = Forks(IMPORTED, {"PYTHONPATH": IMPORT_PATH})
    atexit.register(forks.close)
    return forks


class StubRun:
    """One run's folder, configuration and processes."""

    is_forked = False
    """True if programs are forked from a process with their modules, unless their start is special (`prefix`, faults)."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root = root
        self.paths = RunPaths(root / "run")
        self.paths.root.mkdir(parents=True)
        self.trainer_port, self.engine_port = free_port(), free_port()
        self.processes: list[Program] = []
        self.prefix: list[str] = []
        """Prefix of each command, such as a program that enters a volume."""
        self.max_steps = int(changes.pop("max_steps", 30))
        self.config = self._config(changes)
        self.file = self.paths.run_json
        self.file.write_text(self.config.model_dump_json())

    def _config(self, changes: Mapping[str, Any]) -> RunConfig:
        shared: dict[str, Any] = {
            "name": "stub",
            "uid": "uid",
            "output_dir": str(self.paths.root),
            "model": {"tiny": {}},
            "max_steps": self.max_steps,
            "seq_len": 64,
            "seed": 1,
        }
        algorithm = {"max_async_level": 1, "max_off_policy_steps": 4}
        checkpoint = {"interval": 5, "keep_last": 2}
        document: dict[str, Any] = {
            "trainer": {
                "algorithm": algorithm,
                "checkpoint": checkpoint,
                "port": self.trainer_port,
                "micro_batch_tokens": micro_batch_tokens(shared["seq_len"]),
            },
            "inference": {"port": self.engine_port, "max_model_len": shared["seq_len"]},
            "orchestrator": {
                "algorithm": algorithm,
                "checkpoint": checkpoint,
                "batch_size": 32,
                "environments": [{"id": "reverse-text", "group_size": 8}],
                "sampling": {"max_tokens": 8},
                "evaluation": None,
                "weight_sync": {"timeout_seconds": 10},
                "trainer_url": f"http://127.0.0.1:{self.trainer_port}",
                "inference_urls": [f"http://127.0.0.1:{self.engine_port}"],
                "metrics_port": free_port(),
            },
        }
        if changes.get("task") == "SFT":
            document["inference"] = None
            document["orchestrator"]["environments"] = []
            shared["task"] = "SFT"
        for role, block in document.items():
            if block is not None:
                document[role] = shared | block | changes.get(role, {})
        return RunConfig.model_validate(document)

    def script(self, **script: Any) -> None:
        """Write the script of the run."""
        (self.paths.root / "stub.json").write_text(json.dumps(script))

    def start(
        self, role: str, attempt: int = 1, *, name: str | None = None, file: Path | None = None, **environment: str
    ) -> Program:
        """Start one process; its log is `<name>.<attempt>.log`, its configuration the run's or `file`."""
        variables = os.environ | {
            "RLRUN_ATTEMPT": str(attempt),
            "RLRUN_API_KEY": API_KEY,
            "PYTHONPATH": IMPORT_PATH,
            "PYTHONUNBUFFERED": "1",
        }
        package = "rlrun" if role == "orchestrator" else "tests.support.stub"
        variables |= environment
        words, path = [f"{package}.{role}", "--config", str(file or self.file)], self.log(name or role, attempt)
        process: Program
        if self.is_forked and not self.prefix and FAULT_POINTS not in variables:
            process = stub_forks().start(*words, log=path, environment=variables, exact=True)
        else:
            with path.open("ab") as log:
                command = [*self.prefix, sys.executable, "-m", *words]
                process = subprocess.Popen(command, env=variables, stderr=log, stdout=log)
        self.processes.append(process)
        return process

    def log(self, name: str, attempt: int = 1) -> Path:
        return self.root / f"{name}.{attempt}.log"

    def wait(self, process: Program) -> int:
        """Wait for the end of a process as long as the run makes progress; return its exit code."""
        wait_for(
            lambda: process.poll() is not None, f"the end of {process.args!r}", progress=self.steps, state=self.state
        )
        return process.wait()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition as long as the run makes progress."""
        wait_for(condition, what, progress=self.steps, state=self.state)

    def steps(self) -> int:
        """Return the number of trained steps of all attempts."""
        return len(self.metrics()) if self.paths.metrics.exists() else 0

    def state(self) -> str:
        """Return the last lines of all logs, as the message of a failed test."""
        logs = [f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.root.glob("*.log"))]
        return "\n".join([*logs, str(sorted(p.name for p in self.paths.root.iterdir()))])

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of `metrics.jsonl`: another process may be writing the last one."""
        return read_metrics(self.paths.metrics)[0]

    def trained(self, attempt: int) -> list[int]:
        """Return the steps in the trainer's log."""
        return [int(step) for step in re.findall(r"step (\d+)/\d+: loss", self.log("trainer", attempt).read_text())]

    def stop(self) -> None:
        """Kill all running processes."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def stub_run(root: Path, **changes: Any) -> Iterator[StubRun]:
    """Create a run whose processes end with the block."""
    run = StubRun(root, **changes)
    try:
        yield run
    finally:
        run.stop()
