"""`--recompute`: recompute steps of a run with its own learner, in a temporary folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.dcp import Part
from rlrun.trainer.learning.batch_step import Steps
from rlrun.trainer.learning.learner import make_learner
from rlrun.trainer.learning.objective import bind_objective
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.shared_model import load_policy, model_source
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.group import Group, process_group
from rlrun.trainer.recompute.job import Job
from rlrun.trainer.recompute.sample import Explained, Keeping, explain_sample, sample_of
from rlrun.trainer.recompute.weights import count_changes
from rlrun.trainer.run import trained_parts


def recompute_steps(config: TrainerConfig, job: Job) -> int:
    """Recompute the steps, write the result and return exit code 0; all ranks call it together.

    Args:
        config: configuration of the run, with another output folder.
        job: steps to recompute.

    Raises:
        RoleError: a model, checkpoint or batch cannot be read.
    """
    with process_group(config.gpus_per_replica, config.parallelism) as group:
        found = Recomputation(config, job, group).run()
        if group.leads:
            Path(job.output).write_text(json.dumps(found))
        group.barrier()
    return exit_codes.OK


class Recomputation:
    """Learner of a run in its state before the first recomputed step.

    Args:
        config: configuration, see `recompute_steps`.
        job: steps to recompute.
        group: all ranks; all create it together.
    """

    def __init__(self, config: TrainerConfig, job: Job, group: Group) -> None:
        self._job, self._group = job, group
        self._loss = Keeping.from_mixture(bind_objective(config))
        source = model_source(config, RunPaths(Path(config.output_dir)), group)
        with_weights = config.lora is not None or job.start is None
        self._policy = policy = load_policy(config, source, group, with_weights=with_weights, check=check_model)
        policy.adapters.hold(config.name, config.lora)
        lora.initialize_adapters(policy.module, config.seed)
        optimizer = make_optimizer(policy.module, config.optimizer, group.device)
        learner = make_learner(
            config, policy.module, optimizer, self._loss, source=policy.source, group=group, check=check_model
        )
        self._parts: dict[str, Part] = trained_parts(learner)
        self._steps = Steps(config, policy, learner)
        progress = dcp.Progress()
        if job.start is not None:
            progress = dcp.load_parts(self._parts, Path(job.start), say=logger.warning if group.leads else None)
        self._skipped = 0 if job.origin else progress.skipped_steps

    def run(self) -> dict[str, Any]:
        """Recompute all steps and return the result."""
        lines: list[dict[str, float]] = []
        explained: Explained | None = None
        for step, path in self._job.batches:
            batch = self._steps.read(Path(path), step, written_by=None)
            self._loss.kept.clear()
            metrics = self._step(step, batch)
            lines.append({"step": step} | metrics)
            if self._group.leads:
                logger.info(f"step {step}: loss {metrics.get('loss', math.nan):.6g}")
            if step == self._job.batches[-1][0] and self._job.sample is not None:
                explained = self._explained(step, batch)
        answer: dict[str, Any] = {
            "ranks": self._group.world_size,
            "layout": str(self._group.dims),
            "device": self._group.device.type,
            "steps": lines,
            "sample": explained,
            "weights": None,
        }
        if self._job.end is not None:
            answer["weights"] = count_changes(self._parts, Path(self._job.end), self._group)
        return answer

    def _step(self, step: int, batch: Batch) -> dict[str, float]:
        """Train a step like `Run.step` and return its metrics."""
        metrics = self._steps.train(step, batch, lambda: None)
        self._skipped += int(metrics.pop("skipped"))
        metrics["skipped_steps"] = float(self._skipped)
        metrics["param_checksum"] = parameter_checksum(self._policy.module)
        if batch.validation is not None and batch.validation.after and Path(batch.validation.path).is_dir():
            metrics |= self._steps.validate(batch.validation)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _explained(self, step: int, batch: Batch) -> Explained | None:
        """Explain the sample on the rank that trains on it, and return the result on all ranks."""
        assert self._job.sample is not None
        found = explain_sample(self._loss, self._steps.updates(batch), sample_of(batch, self._job.sample))
        has = self._group.maxima({"rank": float(self._group.rank) if found is not None else -1.0})["rank"]
        return None if has < 0 else self._group.broadcast(found, root=int(has))
