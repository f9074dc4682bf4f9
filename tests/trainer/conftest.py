"""Fixtures: groups of ranks, a run to train, and the orchestrator's end of the channel."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.language_models import ModelConfig, TinyModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.roles import InferenceConfig, OrchestratorConfig, TrainerConfig
from rlrun.config.models.rollout import EnvironmentConfig, SamplingConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.protocol.files.checkpoint_manifest import ORCHESTRATOR_PART
from rlrun.protocol.files.metrics_line import read_metrics
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages import trainer_channel as protocol
from tests.support.programs import wait_for, wait_for_exit
from tests.support.python_path import before
from tests.support.waiting import PATIENCE_SECONDS, StalledError

ROOT = Path(__file__).parents[2]
KEY = "secret"
STEPS = 6
SAMPLES = 12


def make_batch(step: int, attempt: int) -> Batch:
    """Return the samples of a step; they are equal for every writer."""
    rng = np.random.default_rng(step)
    samples = []
    for index in range(SAMPLES):
        length = int(rng.integers(8, 20))
        mask = np.arange(length) >= 6
        samples.append(
            Sample(
                input_ids=rng.integers(8, 104, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -4.6, 0).astype(np.float32),
                versions=np.where(mask, step - 1, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                temperature=float(rng.choice([0.8, 1.0])),
                environment="random",
                task_id=str(index),
                group=index,
                rollout=0,
                dispatch_version=step - 1,
                reward=0.0,
            )
        )
    return Batch(step, attempt, tuple(samples))


def record(root: Path, steps: int) -> Path:
    """Write `rollouts/` of a run of `steps` steps into the run folder `root`."""
    paths = RunPaths(root)
    for step in range(1, steps + 1):
        write_batch(paths.batch(step, 1), make_batch(step, 1))
    return paths.rollouts


@dataclass
class Group:
    """Started ranks."""

    pids: list[int]
    log: Path
    zygote: Zygote
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self) -> list[int]:
        """Wait for all ranks and return their exit codes in order of rank. Like torchrun, a failing rank ends the
        others.
        """
        try:
            wait_for(self._have_ended, "the end of all ranks", progress=lambda: len(self.text()), state=self.text)
        except StalledError:
            self.kill()
            raise
        return [self.codes[pid] for pid in self.pids]

    def _have_ended(self) -> bool:
        while (end := self.zygote.next_end()) is not None:
            pid, code = end
            if pid in self.pids:
                self.codes[pid] = code
                if code:
                    self.kill(signal.SIGTERM)
        return len(self.codes) == len(self.pids)

    def kill(self, number: int = signal.SIGKILL) -> None:
        for pid in self.pids:
            if pid not in self.codes:
                with suppress(ProcessLookupError):  # it has ended, but its exit code is not read yet
                    os.kill(pid, number)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Zygote:
    """Process that forks ranks."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": before(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ends: list[tuple[int, int]] = []
        threading.Thread(target=self._read, daemon=True).start()
        assert self._next_answer() == {"ready": True}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))

    def start(
        self, environment: dict[str, str], arguments: list[str], log: Path, module: str = "rlrun.trainer.__main__"
    ) -> int:
        """Fork a process that calls `main(arguments)` of the module; return its process id."""
        assert self._process.stdin is not None
        request = {"environment": environment, "arguments": arguments, "log": str(log), "module": module}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while "code" in (answer := self._next_answer()):
            self._ends.append((answer["pid"], answer["code"]))
        return int(answer["pid"])

    def _next_answer(self) -> dict[str, Any]:
        wait_for(lambda: not self._answers.empty(), "an answer of the zygote")
        return self._answers.get()

    def next_end(self) -> tuple[int, int] | None:
        """Return the process id and exit code of a rank that has ended, or None."""
        if self._ends:
            return self._ends.pop(0)
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        return answer["pid"], answer["code"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        wait_for_exit(self._process)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model folder of all runs."""
    from rlrun.trainer.modeling.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("model") / "model"
    make_tiny_model(folder, TinyModelConfig(hidden_size=32, layers=2))
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `rollouts/` of a run of six steps."""
    return record(tmp_path_factory.mktemp("recorded"), STEPS)


SHORT: dict[str, Any] = {"micro_batch_tokens": 40}
"""Several micro-batches per step and rank, so that a step can be interrupted between two of them."""


@pytest.fixture(scope="session")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, model: Path, zygote: Zygote, recorded: Path
) -> list[dict[str, float]]:
    """Return the metrics of six steps of two ranks with `SHORT`, which interrupted runs must reproduce."""
    run = Run(RunPaths(tmp_path_factory.mktemp("uninterrupted")), model, zygote)
    return run.train(ranks=2, replay=recorded, **SHORT)


@dataclass
class Run:
    """Run folder with methods that start attempts in it."""

    paths: RunPaths
    model: Path
    zygote: Zygote
    groups: list[Group] = field(default_factory=list)
    port: int = 0
    logs: Path | None = None
    """Folder of logs; None: the run's folder."""

    def write_config(self, *, ranks: int = 1, **options: Any) -> Path:
        """Write `run.json` of a run with small steps and a checkpoint every two steps."""
        self.port = options.pop("port", None) or free_port()
        source = options.pop("model", self.model)
        common: dict[str, Any] = {
            "name": options.pop("name", "test"),
            "uid": "uid",
            "output_dir": str(self.paths.root),
            "model": ModelConfig(path=str(source), dtype=options.pop("dtype", "float32")),
            "max_steps": options.pop("max_steps", STEPS),
            "seq_len": 32,
            "seed": options.pop("seed", 0),
        }
        algorithm = options.pop("algorithm", AlgorithmConfig())
        checkpoint = CheckpointConfig(**({"interval": 2, "keep_last": 10} | options.pop("checkpoint", {})))
        defaults: dict[str, Any] = {
            "processes_per_replica": ranks,
            "micro_batch_tokens": 64,
            "optimizer": OptimizerConfig(lr=1e-3),
            "port": self.port,
        }
        config = RunConfig(
            trainer=TrainerConfig(**common, **(defaults | options), algorithm=algorithm, checkpoint=checkpoint),
            inference=InferenceConfig(**common),
            orchestrator=OrchestratorConfig(
                **common,
                algorithm=algorithm,
                environments=[EnvironmentConfig(id="reverse-text")],
                sampling=SamplingConfig(),
                evaluation=None,
                checkpoint=checkpoint,
                weight_sync=WeightSyncConfig(),
            ),
        )
        self.paths.root.mkdir(parents=True, exist_ok=True)
        self.paths.run_json.write_text(config.model_dump_json(indent=1))
        return self.paths.run_json

    def start(
        self,
        *,
        attempt: int = 1,
        ranks: int = 1,
        replay: Path | None = None,
        sigterm_in: dict[int, str] | None = None,
        kill_in: dict[int, str] | None = None,
        meeting_seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Group:
        """Start all ranks of an attempt.

        `sigterm_in` maps ranks to the `phase:step` in which they get SIGTERM; `kill_in` maps ranks to the
        `phase:step:milliseconds after its start` at which they get SIGKILL; `meeting_seconds` limits how long ranks
        wait for each other after an exception; `environment` adds variables to all ranks.
        """
        arguments = ["--config", str(self.write_config(ranks=ranks, **options))]
        arguments += ["--replay", str(replay)] if replay else []
        log = (self.logs or self.paths.root) / f"trainer.{attempt}.log"
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            "RLRUN_ATTEMPT": str(attempt),
            "RLRUN_API_KEY": KEY,
        }
        if meeting_seconds is not None:
            shared["TEST_MEETING_SECONDS"] = str(meeting_seconds)
        shared |= environment or {}
        signals = {rank: {"TEST_SIGTERM_IN": where} for rank, where in (sigterm_in or {}).items()}
        signals |= {rank: {"TEST_KILL_IN": where} for rank, where in (kill_in or {}).items()}
        pids = [
            self.zygote.start(
                shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | signals.get(rank, {}), arguments, log
            )
            for rank in range(ranks)
        ]
        group = Group(pids, log, self.zygote)
        self.groups.append(group)
        return group

    def train(self, **options: Any) -> list[dict[str, float]]:
        """Run an attempt to its end and return the metrics of all steps."""
        group = self.start(**options)
        codes = group.wait()
        assert not any(codes), f"exit codes {codes}:\n{group.text()}"
        return self.metrics()

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.paths.metrics)[0]


@pytest.fixture
def make_run(tmp_path: Path, model: Path, zygote: Zygote) -> Iterator[Callable[[str], Run]]:
    """Return a function that creates runs in separate folders; their remaining processes are killed at the end."""
    runs: list[Run] = []

    def make(name: str) -> Run:
        runs.append(Run(RunPaths(tmp_path / name), model, zygote))
        return runs[-1]

    yield make
    for run in runs:
        for group in run.groups:
            if len(group.codes) < len(group.pids):
                group.kill()
                group.wait()


class Orchestrator:
    """The orchestrator's end of the channel, one call at a time."""

    def __init__(self, run: Run, attempt: int, prefix: str = "") -> None:
        self.run, self.attempt, self.prefix = run, attempt, prefix
        self.key = KEY
        self.events: list[protocol.Event] = []
        self.given_up: Callable[[], bool] = lambda: False
        """Open a channel to the run's attempt."""

    def call(self, method: str, route: str, document: dict[str, Any] | None = None, *, key: str | None = None) -> Any:
        """Send one request and return the JSON of its response."""
        data = json.dumps(document).encode() if document is not None else None
        headers = {"Authorization": f"Bearer {key or self.key}"}
        request = Request(
            f"http://127.0.0.1:{self.run.port}{self.prefix}{route}", data=data, method=method, headers=headers
        )
        with urlopen(request, timeout=PATIENCE_SECONDS) as response:
            return json.loads(response.read())

    def wait_for(self, kind: str, step: int) -> protocol.Event:
        """Wait for the event of this kind and step and return it."""

        def received() -> protocol.Event | None:
            for event in self.events:
                if (event.kind, event.step) == (kind, step):
                    return event
            assert not self.given_up(), self._seen()
            try:
                answer = self.call("GET", f"{protocol.EVENTS}?after={len(self.events)}&wait=2")
            except HTTPError:
                raise
            except OSError:  # the server does not listen yet
                return None
            self.events += [protocol.Event(**event) for event in answer["events"]]
            return None

        found = wait_for(
            received, f"the event {kind} of step {step}", progress=lambda: len(self.events), state=self._seen
        )
        assert found is not None
        return found

    def _seen(self) -> str:
        log = self.run.groups[-1].text() if self.run.groups else ""
        return f"events: {self.events}\n{log}"

    def send_batch(self, step: int) -> None:
        """Write the batch of a step and announce it."""
        path = self.run.paths.batch(step, self.attempt)
        write_batch(path, make_batch(step, self.attempt))
        self.call("POST", protocol.BATCHES, {"step": step, "path": str(path)})

    def complete_checkpoint(self, step: int) -> None:
        """Add the orchestrator's part and wait for the manifest."""
        saved = self.wait_for("checkpoint_saved", step)
        assert saved.path is not None
        part = Path(saved.path) / ORCHESTRATOR_PART
        part.mkdir()
        (part / "state.json").write_text(json.dumps({"step": step}))
        self.call("POST", protocol.CHECKPOINTS, {"step": step})
        self.wait_for("checkpoint_complete", step)

    def step(self, step: int) -> dict[str, float]:
        """Send the batch of one step, wait until it is trained and return its metrics."""
        self.send_batch(step)
        metrics = self.wait_for("trained", step).metrics
        if step % 2 == 0:
            self.complete_checkpoint(step)
        return metrics
