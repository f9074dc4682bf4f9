"""A whole objective: the loss with its options, aggregation, regularisers, correction and proximal policy, as a trainer uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlrun.algorithms.policy import LossOutput, denominator_count, policy_loss
from rlrun.algorithms.proximal import proximal_logprobs as make_proximal
from rlrun.algorithms.regularizers import Regularizers
from rlrun.config.algorithm_names import DEFAULT_LOSS


@dataclass(frozen=True)
class Objective:
    """Objective of a step. Call `denominator` with the whole batch, then the objective with each micro-batch of it."""

    loss: str = DEFAULT_LOSS
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str | None = None
    aggregation_length: float | None = None
    regularizers: Regularizers = field(default_factory=Regularizers)
    correction: Mapping[str, Any] | None = None
    proximal: str = "inference"
    """A key of `PROXIMAL_METHODS`."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy must be given with its gradient."""
        return self.regularizers.entropy > 0

    def denominator(self, mask: Tensor, sequence_lengths: Sequence[int]) -> float:
        """Divisor of the loss of each micro-batch.

        Args:
            mask: `[T]` bool, the loss mask of all sequences of the batch, on all ranks.
            sequence_lengths: their lengths.
        """
        count = denominator_count(
            self.loss,
            mask,
            sequence_lengths,
            aggregation=self.aggregation,
            aggregation_length=self.aggregation_length,
            **self.options,
        )
        return float(count)

    def __call__(
        self,
        logprobs: Tensor,
        *,
        inference_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        sequence_lengths: Sequence[int],
        denominator: float | None = None,
        entropy: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        versions: Tensor | None = None,
        policy_version: int | None = None,
    ) -> LossOutput:
        """`policy_loss` with these settings.

        Args:
            proximal_logprobs: `[T]` at the start of the step; default: made of the other arguments by the method `proximal`. For
                `recompute` that is right as long as nothing has been updated since the step began.
            versions, policy_version: of each token `[T]` and of the policy, for `log_linear`.
        """
        if proximal_logprobs is None and self.proximal != "inference":
            kept = mask.bool()
            proximal_logprobs = make_proximal(
                self.proximal,
                logprobs,
                inference_logprobs,
                versions=None if versions is None else torch.where(kept, versions, 0),
                policy_version=policy_version,
            )
        return policy_loss(
            self.loss,
            logprobs,
            inference_logprobs=inference_logprobs,
            advantages=advantages,
            mask=mask,
            sequence_lengths=sequence_lengths,
            proximal_logprobs=proximal_logprobs,
            reference_logprobs=reference_logprobs,
            denominator=denominator,
            aggregation=self.aggregation,
            aggregation_length=self.aggregation_length,
            regularizers=self.regularizers,
            entropy=entropy,
            correction=self.correction,
            **self.options,
        )
