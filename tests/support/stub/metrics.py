"""The metrics of a stub's step, under the names of the real trainer's."""

from __future__ import annotations

import math

import numpy as np

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.lr_schedule import learning_rate
from tests.support.stub.policy import Policy


def step_metrics(config: TrainerConfig, batch: Batch, policy: Policy, times: dict[str, float]) -> dict[str, float]:
    """Return metrics for the `trained` event of a step.

    Args:
        config: configuration of the trainer.
        batch: trained batch.
        policy: policy after the step.
        times: seconds, by metric.
    """
    logprobs = np.concatenate([sample.logprobs[sample.loss_mask] for sample in batch.samples])
    advantages = np.concatenate([sample.advantages[sample.loss_mask] for sample in batch.samples])
    return times | {
        "loss": float(-(advantages * logprobs).mean()),
        "grad_norm": float(np.abs(advantages).mean()),
        "lr": learning_rate(config.scheduler, config.optimizer.lr, policy.step, config.max_steps),
        "entropy": float(-logprobs.mean()),
        "mismatch_kl": 0.0,
        "mismatch_kl_max": 0.0,
        "ratio_max": 1.0,
        "sequences": float(sum(bool(sample.loss_mask.any()) for sample in batch.samples)),
        "tokens": float(batch.tokens),
        "loss_tokens": float(batch.loss_tokens),
        "skipped_steps": 0.0,
        "param_checksum": policy.checksum,
        "time/optimizer": 0.0,
        "perf/throughput": batch.tokens / max(times["time/forward_backward"], 1e-6),
    }


def validation_metrics(batch: Batch, policy: Policy) -> dict[str, float]:
    """Return metrics of held-out samples, as if the policy writes each learned token with its accuracy.

    Args:
        batch: the held-out samples.
        policy: the present policy.
    """
    return {
        "validation/loss": -math.log(policy.accuracy),
        "validation/loss_tokens": float(batch.loss_tokens),
        "time/validate": 0.0,
    }
