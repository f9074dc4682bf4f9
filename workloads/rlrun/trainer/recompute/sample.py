"""Explanation of one sample by the step that trains on it: the very calls of the objective are kept, and asked for each token's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlrun.algorithms import LossOutput, Mixture
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.learning.minibatches import Update

Explained = dict[str, Any]
"""JSON: what the objective makes of a sample."""


@dataclass(frozen=True)
class _Call:
    """One micro-batch, as the objective was called with it."""

    logprobs: Tensor
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Keeping(Mixture):
    """A run's objective that keeps its calls while `calls` is a list."""

    kept: list[_Call] = field(default_factory=list, compare=False)

    @classmethod
    def from_mixture(cls, loss: Mixture) -> Keeping:
        """The same objective."""
        return cls(loss.own, loss.environments, loss.gae, loss.kl_rewards)

    def __call__(self, logprobs: Tensor, **arguments: Any) -> LossOutput:
        # `Mixture.merged` asks for the names of metrics with a sequence of one token; no row has such a one.
        if list(arguments["sequence_lengths"]) != [1]:
            self.kept.append(_Call(logprobs.detach(), arguments))
        return super().__call__(logprobs, **arguments)


def explain_sample(loss: Keeping, updates: Sequence[Update], sample: Sample) -> Explained | None:
    """Terms of each token of a sample in the step that was just trained; None: another rank trains on it.

    Args:
        loss: kept the calls of this step alone.
        updates: of the step, with this rank's rows.
        sample: one of theirs, the same object.
    """
    calls = len(loss.kept) // max(
        sum(len(update.rows) for update in updates), 1
    )  # a linear loss is called twice for a row
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
    """The objective's terms of the tokens in `span` of one of its calls."""
    arguments = dict(call.arguments)
    arguments["entropy"] = arguments["entropy"].detach()
    start = call.logprobs.clone().requires_grad_()
    names = ["", *loss.environments]
    number = names.index(sample.environment) if sample.environment in names[1:] else 0
    found = loss.token_terms(start, **arguments)[number]
    objective, divisor = loss.objectives[number], arguments["divisors"].batch[number]
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
    """The sample at an index, which the caller has looked up in the batch."""
    return batch.samples[index]
