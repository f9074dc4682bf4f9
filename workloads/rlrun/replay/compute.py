"""Repeated computation of a step by the trainer's ranks, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlrun.config.models.roles import TrainerConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import telling_lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.replay.find import Plan, ReplayError
from rlrun.trainer.ranks.launch import torchrun_command
from rlrun.trainer.recompute.job import Job

Answer = dict[str, Any]
Start = Callable[[TrainerConfig, Path, Job], None]
"""Function that starts the ranks of a configuration file and waits for the answer."""


def local_layout(config: TrainerConfig, *, ranks: int | None, model: Path | None) -> TrainerConfig:
    """Adapt the run's configuration to this machine.

    Args:
        config: configuration of the run.
        ranks: number of ranks on CPUs instead of the run's layout.
        model: folder of the model on this machine.
    """
    changes: dict[str, object] = {"colocated": False, "engine_urls": []}
    if ranks is not None:
        changes |= {"replicas": 1, "gpus_per_replica": 0, "processes_per_replica": ranks}
    if model is not None:
        changes["model"] = config.model.model_copy(update={"path": str(model), "name": None, "tiny": None})
    return config.model_copy(update=changes)


def compute_step(plan: Plan, config: TrainerConfig, start: Start, *, sample: int | None = None) -> Answer:
    """Repeat the computation of a step.

    Args:
        plan: files of the step.
        config: result of `local_layout`.
        start: function that starts the ranks, such as `run_ranks`.
        sample: index of a sample to explain.

    Raises:
        ReplayError: the ranks failed; the message contains their last lines.
    """
    with tempfile.TemporaryDirectory(prefix="rlrun-replay-") as made:
        scratch = RunPaths(Path(made))
        _prepare_folder(scratch, plan.run.paths)
        job = Job(
            output=str(scratch.root / "answer.json"),
            batches=tuple((step, str(path)) for step, path in plan.batches),
            start=None if plan.start is None else str(plan.start),
            origin=plan.origin is not None,
            end=None if plan.end is None else str(plan.end),
            sample=sample,
        )
        write_json(scratch.run_json, {"trainer": _dump_config(config, scratch)})
        start(config, scratch.run_json, job)
        return job.answer()


def _dump_config(config: TrainerConfig, scratch: RunPaths) -> dict[str, object]:
    return config.model_copy(update={"output_dir": str(scratch.root)}).model_dump(mode="json")


def _prepare_folder(scratch: RunPaths, paths: RunPaths) -> None:
    """Create the part of a trainer's folder that it reads: a link to the tiny model, and a copy of the hub's commits,
    which it may change.
    """
    if paths.model.is_dir():
        scratch.model.symlink_to(paths.model.absolute())
    if paths.revisions.is_dir():
        shutil.copytree(paths.revisions, scratch.revisions)


def run_ranks(config: TrainerConfig, file: Path, job: Job) -> None:
    """Start the ranks on this machine and wait for them.

    Raises:
        ReplayError: the ranks failed.
    """
    command = torchrun_command(config, config_file=file, rendezvous_port=free_port(), attempt=1)
    environment = {**os.environ, "RLRUN_ATTEMPT": "1"}
    if config.gpus_per_replica == 0:
        environment["OMP_NUM_THREADS"] = (
            "1"  # the same as in a run on CPUs, because more threads change the bits of sums
        )
    done = subprocess.run(
        [*command, *job.rank_arguments()], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        output = "\n".join(telling_lines(done.stdout, 15))
        raise ReplayError(
            f"the trainer failed with exit code {done.returncode} during the step:\n{output}", done.returncode
        )
