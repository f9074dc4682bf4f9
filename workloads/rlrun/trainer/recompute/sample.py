"""Explanation of one sample of a step: the calls of the objective are recorded and repeated for the terms of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlrun.algorithms import LossBatch, LossOutput, Mixture
from rlrun.algorithms.mixture import Divisors
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.learning.minibatches import Update

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
        return cls(loss.own, loss.environments, loss.gae, loss.kl_rewards)

    def __call__(
        self, logprobs: Tensor, batch: LossBatch, *, environments: Sequence[str], divisors: Divisors
    ) -> LossOutput:
        # `Mixture.merged` calls the objective with a sequence of one token to get the names of metrics; real rows are longer.
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
