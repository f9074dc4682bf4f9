"""Recomputation of a run's steps with its own learner, in a temporary folder (`--recompute`).

One sample of a step can be explained: the calls of the objective are recorded and repeated for the terms of each token. Trained parameters
and optimizer states can be compared with a checkpoint, on all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from rlrun.algorithms import LossBatch, LossOutput, Mixture
from rlrun.algorithms.objective_mixture import Divisors
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints import dcp
from rlrun.trainer.checkpoints.dcp import Part, Progress, load_parts, snapshot_shards
from rlrun.trainer.learning.batch_step import Steps
from rlrun.trainer.learning.learner import make_learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update, bind_objective
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.modeling.shared_model import load_policy, model_source
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.group import Group, process_group
from rlrun.trainer.ranks.launch import Job
from rlrun.trainer.trained_run import trained_parts

Explained = dict[str, Any]
"""JSON document with the objective's terms of a sample."""


@dataclass(frozen=True)
class _Call:
    """Recorded call of the objective with one micro-batch."""

    logprobs: Tensor
    batch: LossBatch
    environments: Sequence[str]
    divisors: Divisors


@dataclass(frozen=True)
class Keeping(Mixture):
    """Objective of a run that records its calls in `kept`."""

    kept: list[_Call] = field(default_factory=list, compare=False)

    @classmethod
    def from_mixture(cls, loss: Mixture) -> Keeping:
        """Create a recording copy of an objective."""
        return cls(loss.run_objective, loss.environments, loss.gae, loss.kl_rewards)

    def __call__(
        self, logprobs: Tensor, batch: LossBatch, *, environments: Sequence[str], divisors: Divisors
    ) -> LossOutput:
        # `Mixture.add_metrics` calls the objective with a sequence of one token to get the names of metrics; real rows are longer.
        if list(batch.sequence_lengths) != [1]:
            self.kept.append(_Call(logprobs.detach(), batch, environments, divisors))
        return super().__call__(logprobs, batch, environments=environments, divisors=divisors)


def explain_sample(loss: Keeping, updates: Sequence[Update], sample: Sample) -> Explained | None:
    """Return the terms of each token of a sample in the last step, or None if another rank trains on the sample.

    Args:
        loss: objective with the recorded calls of only this step.
        updates: updates of the step, with this rank's rows.
        sample: sample of one of the updates, the same object.
    """
    calls = len(loss.kept) // max(
        sum(len(update.rows) for update in updates), 1
    )  # a linear loss is called twice per row
    number = 0
    for place, update in enumerate(updates):
        for row in update.rows:
            number += 1
            members = [update.batch.samples[index] for index in row]
            at = next((i for i, member in enumerate(members) if member is sample), None)
            if at is None or not calls:
                continue
            start = sum(len(member) for member in members[:at])
            span = slice(start, start + len(sample))
            return {"update": place, "updates": len(updates)} | _token_terms(
                loss, loss.kept[number * calls - 1], sample, span
            )
    return None


def _token_terms(loss: Keeping, call: _Call, sample: Sample, span: slice) -> Explained:
    """Compute the objective's terms of the tokens in `span` of a recorded call."""
    assert call.batch.entropy is not None
    batch = replace(call.batch, entropy=call.batch.entropy.detach())
    start = call.logprobs.clone().requires_grad_()
    names = ["", *loss.environments]
    number = names.index(sample.environment) if sample.environment in names[1:] else 0
    terms = loss.token_terms(start, batch, environments=call.environments, divisors=call.divisors)
    found = terms[number]
    objective, divisor = loss.objectives[number], call.divisors.batch[number]
    mask = found.inputs.mask
    weighted = torch.where(mask, found.loss, 0) * found.weights
    (slope,) = torch.autograd.grad(weighted.sum() / divisor, start)
    kept = mask[span]

    def values(tensor: Tensor) -> list[float]:
        return [float(value) for value in tensor.detach()[span][kept].double().tolist()]

    inputs = found.inputs
    columns = {
        "logprob": inputs.logprobs,
        "sampled_logprob": inputs.inference_logprobs,
        "advantage": inputs.advantages,
        "loss": found.loss,
        "share_of_loss": weighted / divisor,
        "slope": slope,
    }
    optional = {"proximal_logprob": inputs.proximal_logprobs, "reference_logprob": inputs.reference_logprobs}
    columns |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    return {
        "loss": objective.loss,
        "options": dict(objective.options),
        "aggregation": objective.aggregation,
        "divisor": divisor,
        "positions": torch.nonzero(kept).flatten().tolist(),
        "tokens": {name: values(tensor) for name, tensor in columns.items()},
        "metrics": {name: values(tensor) for name, tensor in found.metrics.items()},
    }


def sample_of(batch: Batch, index: int) -> Sample:
    """Return the sample at an index that the caller has taken from the batch."""
    return batch.samples[index]


def count_changes(parts: Mapping[str, Part], checkpoint: Path, group: Group) -> dict[str, float]:
    """Load a checkpoint into the parts and count the changed tensors. The parts contain the checkpoint's values afterwards.

    Args:
        parts: trained modules and optimizers, by name.
        checkpoint: folder of the checkpoint of the same run and step.
        group: all ranks; all call this function together.

    Returns:
        Number of `tensors` and of `different` tensors (any bit differs) of parameters and optimizers, summed over ranks, and the
        `largest` absolute difference.
    """
    before = {name: tensor.clone() for name, tensor in _state_tensors(parts)}
    load_parts(parts, checkpoint)
    counts = {"tensors": 0.0, "different": 0.0}
    largest = 0.0
    for name, stored in _state_tensors(parts):
        found = before[name]
        counts["tensors"] += 1
        if not torch.equal(found, stored):
            counts["different"] += 1
            largest = max(largest, float((found.double() - stored.double()).abs().max()))
    return group.sum_over_ranks(counts) | group.max_over_ranks({"largest": largest})


def _state_tensors(parts: Mapping[str, Part]) -> list[tuple[str, Tensor]]:
    state = snapshot_shards(parts, Progress())
    return [
        (name, local_part(value.detach()))
        for name, value in _leaf_tensors("", {key: value for key, value in state.items() if key != "progress"})
    ]


def _leaf_tensors(path: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in _leaf_tensors(f"{path}/{key}", one)]
    return []


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
        policy.adapters.load_run(config.name, config.lora)
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
            batch = self._steps.load_batch(Path(path), step, written_by=None)
            self._loss.kept.clear()
            metrics = self._recompute_step(step, batch)
            lines.append({"step": step} | metrics)
            if self._group.leads:
                logger.info(f"step {step}: loss {metrics.get('loss', math.nan):.6g}")
            if step == self._job.batches[-1][0] and self._job.sample is not None:
                explained = self._explain_sample(step, batch)
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

    def _recompute_step(self, step: int, batch: Batch) -> dict[str, float]:
        """Train a step like `Run.step` and return its metrics."""
        metrics = self._steps.train(step, batch, lambda: None)
        self._skipped += int(metrics.pop("skipped"))
        metrics["skipped_steps"] = float(self._skipped)
        metrics["param_checksum"] = parameter_checksum(self._policy.module)
        if batch.validation is not None and batch.validation.after and Path(batch.validation.path).is_dir():
            metrics |= self._steps.held_out_loss(batch.validation)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _explain_sample(self, step: int, batch: Batch) -> Explained | None:
        """Explain the sample on the rank that trains on it, and return the result on all ranks."""
        assert self._job.sample is not None
        found = explain_sample(self._loss, self._steps.divide_batch(batch), sample_of(batch, self._job.sample))
        has = self._group.max_over_ranks({"rank": float(self._group.rank) if found is not None else -1.0})["rank"]
        return None if has < 0 else self._group.broadcast(found, root=int(has))
