"""Sizes of the complete run, and its `rlrun local`: the manifest, the process and the metrics of each step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.engine_choice import EngineChoice
from benchmarks.gpu.results import Deadline
from benchmarks.gpu.run_events import Events, GpuSample, GpuSampler
from benchmarks.gpu.run_task import ENVIRONMENT, WarmUp
from benchmarks.local_command import local_command
from rlrun.protocol.files.metrics_line import read_metrics

ROOT = Path(__file__).parents[2]
API_KEY = "complete-run-key"
"""Key of an engine on the loopback interface of this machine."""
SEED = 0
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL. The roles of a killed `rlrun local` receive SIGTERM from the kernel."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts. Times in seconds."""

    model: Mapping[str, int]
    dtype: str
    device: str
    tokens: int
    """Tokens of a reply."""
    prompts: int
    """Prompts of a step; each has `group` replies."""
    group: int
    steps: tuple[int, int]
    """Steps of run A and of run B."""
    wrong: tuple[int, int]
    """Steps of run B between which its engine gets wrong weights."""
    evaluation: tuple[int, int]
    """Steps between evaluations, and their tasks."""
    lr: tuple[float, float]
    """Learning rates of run A and of run B. That of run B is small, so that its rollouts, which are one version behind,
    still match the trainer: only wrong weights differ.
    """
    broadcast: int
    """Bytes of one broadcast."""
    handovers: int
    decoded: tuple[int, int]
    """Sequences of the measurement of tokens/s, and their tokens."""
    compared: int
    """Prompts of the comparison with transformers."""
    sharpen: float
    """Factor of the logits of run B's model: a flat distribution hides wrong weights, and a sharp one the equality of right ones.

    Measured with the full shape on a CPU: rounding to bfloat16 alone gives a KL of 1.5e-4 with factor 2, 3.6e-4 with 3 and 5e-3
    with 20; weights of another seed give 1.8, 3.9 and 43. The dry model is narrower, so its logits are smaller.
    """
    shares: tuple[float, float]
    """Shares of the GPU's memory for the engines of run A and run B."""
    engine: EngineChoice
    """Arguments of the engines."""
    warm_up: WarmUp
    """Supervised steps of run A's model. Its learning rate and that of run A are 0.128 divided by the width, as in the measured
    curves: an Adam step changes a logit by about the learning rate times the width.
    """
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time that must be left for a part to start."""

    @property
    def gpus(self) -> int:
        """GPUs of each role."""
        return int(self.device == "cuda")


FULL = Sizes(
    model={
        "layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_size": 128, "intermediate": 3072,
        "vocabulary": 512,
    },
    dtype="bfloat16", device="cuda", tokens=32, prompts=64, group=8, steps=(25, 20), wrong=(6, 14), evaluation=(5, 96), lr=(1.25e-4, 1e-7),
    broadcast=256 * 2**20, handovers=20, decoded=(64, 512), compared=16, sharpen=2.0, shares=(0.5, 0.35),
    part_seconds={"nccl": 15, "colocated": 150, "concurrent": 130, "engine": 25}, engine=EngineChoice(),
    warm_up=WarmUp(steps=30, lr=1.25e-4),
)  # fmt: skip
DRY = Sizes(
    model={
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_size": 32, "intermediate": 128, "vocabulary": 104,
    },
    dtype="float32", device="cpu", tokens=8, prompts=4, group=4, steps=(5, 20), wrong=(6, 14), evaluation=(5, 6), lr=(1e-3, 1e-7),
    broadcast=2**20, handovers=4, decoded=(8, 16), compared=4, sharpen=20.0, shares=(0.5, 0.35),
    engine=EngineChoice((), "the CPU has one attention backend"), warm_up=WarmUp(steps=2, lr=1e-3, replies=6, tokens=8),
)  # fmt: skip


@dataclass
class LocalRun:
    """A finished `rlrun local`."""

    folder: Path
    code: int
    stopped: bool
    """Whether it was stopped at the time limit."""
    steps: list[tuple[float, Mapping[str, Any]]]
    """Metrics of each step, and the time at which they were seen."""
    samples: list[GpuSample]

    @property
    def end(self) -> str:
        """How it ended, as text."""
        steps = f"after step {self.trained}"
        return f"stopped at the time limit, {steps}" if self.stopped else f"exit code {self.code}, {steps}"

    def values(self, name: str, start: int = 0) -> list[float]:
        """Return a metric of all steps from `start` on that have it."""
        return [float(line[name]) for _, line in self.steps if name in line and line["step"] >= start]

    @property
    def weights(self) -> list[Path]:
        """Folders of its complete versions, the newest last."""
        return sorted(path for path in (self.folder / "weights").glob("v*") if (path / "COMPLETE").exists())

    @property
    def trained(self) -> int:
        """Number of its last step."""
        return max((int(line["step"]) for _, line in self.steps), default=0)


def specification(sizes: Sizes, model: Path, *, run: int) -> dict[str, Any]:
    """Return the part of a run's specification that both runs share.

    Args:
        sizes: sizes of all parts.
        model: folder of the model.
        run: 0 for run A, 1 for run B.
    """
    return {
        "model": {"path": str(model), "dtype": sizes.dtype},
        "maxSteps": sizes.steps[run],
        "seqLen": 16 + sizes.tokens,
        "seed": SEED,
        "environments": [{"id": ENVIRONMENT, "groupSize": sizes.group, "args": {"tokens": sizes.tokens}}],
        "sampling": {"temperature": 1.0, "maxTokens": sizes.tokens},
        "orchestrator": {"batchSize": sizes.prompts * sizes.group, "maxConcurrency": sizes.prompts * sizes.group},
        "trainer": {"gpusPerReplica": sizes.gpus, "optimizer": {"lr": sizes.lr[run]}},
        "inference": {
            "gpusPerReplica": sizes.gpus, "gpuMemoryUtilization": sizes.shares[run], "maxNumSeqs": 512,
            "extraArgs": list(sizes.engine.arguments),
            "maxModelLen": max(16 + sizes.tokens, 16 + sizes.decoded[1]),
        },
        "checkpoint": {"enabled": False},
    }  # fmt: skip


class LocalRuns:
    """Starter of `rlrun local` in one folder.

    Args:
        work: folder of the runs.
        events: records.
        sampler: samples of the GPU.
        deadline: time at which a run is stopped.
    """

    def __init__(self, work: Path, events: Events, sampler: GpuSampler, deadline: Deadline) -> None:
        self._work, self._events, self._sampler, self._deadline = work, events, sampler, deadline

    def start(
        self, name: str, spec: Mapping[str, Any], *options: str, watch: Callable[[int], None] = lambda step: None
    ) -> LocalRun:
        """Run `rlrun local` to its end, or until the time is over.

        Args:
            name: name of the run, and of its folder.
            spec: its specification.
            options: further options.
            watch: function that is called ten times per second with the newest step.
        """
        where = self._work / name
        where.mkdir(parents=True, exist_ok=True)
        manifest, folder = where / "run.yaml", where / "run"
        document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": name}, "spec": dict(spec)}
        manifest.write_text(yaml.safe_dump(document))
        command = local_command(manifest, folder, *options)
        self._events.add("run started", name=name, command=command[1:])
        began, steps = time.monotonic(), dict[int, tuple[float, Mapping[str, Any]]]()
        with (where / "local.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=run_environment(), cwd=ROOT)
        stopped = False
        try:
            while True:
                ended = process.poll() is not None
                self._read_steps(name, folder, steps)
                stopped = not ended and self._deadline.left <= 0
                if ended or stopped:
                    break
                watch(max(steps, default=0))
                time.sleep(POLL_SECONDS)
        finally:
            stop_process(process, signal.SIGTERM, STOP_SECONDS)
        end = time.monotonic()
        self._events.add("run ended", name=name, code=process.returncode, took=round(end - began, 1))
        if process.returncode:
            self._events.add("log", name=name, text=(where / "local.log").read_text(errors="replace")[-3000:])
        samples = self._sampler.between(began, end)
        return LocalRun(folder, process.returncode, stopped, list(steps.values()), samples)

    def _read_steps(self, name: str, folder: Path, steps: dict[int, tuple[float, Mapping[str, Any]]]) -> None:
        file = folder / "metrics.jsonl"
        for line in read_metrics(file)[0] if file.exists() else []:
            if int(line["step"]) not in steps:
                steps[int(line["step"])] = time.monotonic(), line
                self._events.add("step", run=name, **{key: line[key] for key in STEP_METRICS if key in line})


STEP_METRICS = (
    *("step", "reward/mean", "mismatch_kl", "mismatch_kl_max", "entropy", "off_policy/max", "time/step"),
    *("time/update_weights", "time/engines_asleep", "time/make_batch"),
)
"""Metrics of the events; `metrics.jsonl` of a run has all."""


def run_environment() -> dict[str, str]:
    """Return the environment of started programs, which also finds the task of this folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RLRUN_API_KEY": API_KEY,
        "PYTHONPATH": path,
    }
    return {**os.environ, **variables}


def stop_process(process: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    """Stop a process that still runs by a signal, and kill it after `seconds`."""
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
