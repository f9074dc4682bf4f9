"""Objective of a policy: loss function with options, aggregation, regularizers, correction and proximal policy.

The trainer binds an `Objective` once. The plain functions at the end are for scripts and notebooks: each call binds the objective again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms import losses
from rlrun.algorithms.aggregation import aggregation_count, check_aggregation, divide_total, token_weights
from rlrun.algorithms.correction import correct_inputs
from rlrun.algorithms.correction import proximal_logprobs as make_proximal
from rlrun.algorithms.kl import Regularizers, kl_estimate, mismatch_kl
from rlrun.algorithms.loss_inputs import LossBatch, LossInputs, prepare_inputs
from rlrun.algorithms.losses import TokenLoss
from rlrun.config.algorithm.names import (
    DEFAULT_LOSS,
    LOSS_ENTRIES,
    PROXIMAL_METHODS,
    Options,
    check_known,
    complete_correction,
    correction_problem,
    default_aggregation,
    proximal_problem,
)
from rlrun.custom import Algorithm, bind

LOSSES: Mapping[str, Algorithm] = {
    name: Algorithm(getattr(losses, entry.function or name), entry.options) for name, entry in LOSS_ENTRIES.items()
}
"""Built-in losses: functions of `losses` that `LOSS_ENTRIES` declares."""


QUARTERS: Mapping[str, str] = {f"mismatch_kl/q{quarter}": f"tokens/q{quarter}" for quarter in range(1, 5)}
"""Metrics of one quarter of the loss tokens of each sequence, and the numbers of their tokens: a mismatch that grows along an answer, as of
a recurrent state in bfloat16, is largest in the last quarter.
"""


class LossOutput(NamedTuple):
    """Differentiable scalar loss, and detached scalar metrics on its device (see `merge_metrics`)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class TokenTerms(NamedTuple):
    """Loss and weight of each token, both `[T]`; the objective is Σ loss·weight over the loss tokens, divided by the divisor."""

    loss: Tensor
    """Differentiable loss of each token."""
    weights: Tensor
    """Weight of the aggregation."""
    metrics: dict[str, Tensor]
    """Metrics of the loss, the regularizers and the correction."""
    inputs: LossInputs


@dataclass(frozen=True)
class Objective:
    """Objective of a step: call `denominator` with the whole batch, then the objective with each micro-batch.

    The constructor resolves names, completes options and checks them, so that the calls per micro-batch only compute.

    Raises:
        ValueError: a name or option is unknown, a value is out of range, or two options exclude each other.
    """

    loss: str = DEFAULT_LOSS
    """Key of `LOSSES`, or `package.module:function`, which is called as `function(LossInputs, **options)` and returns a `TokenLoss`."""
    options: Options = field(default_factory=dict)
    """Options of the loss, see `LOSSES[loss].options`; missing ones have their defaults."""
    aggregation: str | None = None
    """Key of `AGGREGATIONS`. Default: aggregation of the loss, see `default_aggregation`."""
    aggregation_length: float | None = None
    """Number of tokens for `constant_length`."""
    regularizers: Regularizers = field(default_factory=Regularizers)
    """Terms added to the loss of each token before the aggregation."""
    correction: Options | None = None
    """Options of `correct_mismatch`, whose weights multiply the loss of each token, without the regularizers."""
    proximal: str = "inference"
    """Key of `PROXIMAL_METHODS`; only `inference` is allowed if neither loss nor correction reads proximal log-probs."""
    _function: Callable[..., TokenLoss] = field(init=False, repr=False, compare=False)
    _weighs_twice: str | None = field(init=False, repr=False, compare=False, default=None)
    """Error message of a correction without proximal log-probs, or None."""

    def __post_init__(self) -> None:
        function, options = bind("loss", self.loss, LOSSES, self.options)
        aggregation = self.aggregation or default_aggregation(self.loss, options)
        check_aggregation(aggregation, self.aggregation_length)
        check_known("proximal", self.proximal, PROXIMAL_METHODS)
        bound: dict[str, object] = {"_function": function, "options": options, "aggregation": aggregation}
        correction = None if self.correction is None else complete_correction(self.correction)
        if correction is not None and correction["action"] == "none":
            correction = None
        bound["correction"] = correction
        if self.proximal != "inference" and (
            problem := proximal_problem(self.loss, self.proximal, corrected=correction is not None)
        ):
            raise ValueError(problem)
        if correction is not None:
            if problem := correction_problem(correction, self.loss, has_proximal=True):
                raise ValueError(problem)
            bound["_weighs_twice"] = correction_problem(correction, self.loss, has_proximal=False)
        for name, value in bound.items():
            object.__setattr__(self, name, value)

    @property
    def needs_entropy(self) -> bool:
        """Whether the objective needs the entropy with its gradient."""
        return self.regularizers.entropy > 0

    @property
    def is_linear(self) -> bool:
        """Whether the gradient on each log-prob is a constant of weight and aggregation, known before the log-prob."""
        terms = self.regularizers
        return self.loss == "sft" and self.correction is None and terms.entropy == 0 and terms.kl == 0

    def count(self, mask: Tensor, sequence_lengths: Sequence[int]) -> Tensor:
        """Return the contribution of these sequences to the divisor, a scalar.

        It is the number of loss tokens for `token_mean`, otherwise the number of sequences with a loss token, times the length for
        `constant_length`.
        """
        assert self.aggregation is not None
        return aggregation_count(self.aggregation, mask, sequence_lengths, length=self.aggregation_length)

    def denominator(self, mask: Tensor, sequence_lengths: Sequence[int]) -> float:
        """Return the divisor of the loss of each micro-batch.

        Args:
            mask: loss mask of all sequences of the batch on all ranks, `[T]` bool.
            sequence_lengths: lengths of the sequences.
        """
        return float(self.count(mask, sequence_lengths))

    def __call__(self, logprobs: Tensor, batch: LossBatch) -> LossOutput:
        """Return the sum of the per-token loss over the loss mask, divided by the denominator.

        Args:
            logprobs: log-probs of the packed tokens under the current policy, `[T]`.
            batch: all other inputs. Without proximal log-probs the method `proximal` computes them; for `recompute` this is correct until
                the first update of the step.

        Returns:
            Loss (0 with a zero gradient for an empty loss mask) and sums over the loss tokens: `tokens`, `sequences`, `mismatch_kl`,
            `ratio`, `clip_fraction` or `dropped_fraction`; with a reference `reference_kl` (k3); with a correction `correction_weight`
            and `corrected_fraction`; the maxima `ratio_max` and `mismatch_kl_max`; and the sums of `QUARTERS`. Divide the sums by `tokens`
            (those of `QUARTERS` by their own tokens) after adding them up (`objective_means`).

        Raises:
            ValueError: an input is misaligned, not finite or out of range; the message contains its name.
        """
        found = self.token_terms(logprobs, batch)
        inputs = found.inputs
        total = (torch.where(inputs.mask, found.loss, 0) * found.weights).sum()
        denominator = batch.denominator
        if denominator is None:
            denominator = self.count(inputs.mask, batch.sequence_lengths)
        counts = {"tokens": inputs.mask.sum(), "sequences": (inputs.sequence_tokens() > 0).sum()}
        return LossOutput(
            divide_total(total, denominator),
            {key: count.to(total.dtype) for key, count in counts.items()} | _metric_sums(inputs, found.metrics),
        )

    def token_terms(self, logprobs: Tensor, batch: LossBatch) -> TokenTerms:
        """Return the terms of each token before they are summed; for the arguments see a call."""
        if batch.proximal_logprobs is None and self.proximal != "inference":
            versions = batch.versions
            proximal = make_proximal(
                self.proximal,
                logprobs,
                batch.inference_logprobs,
                versions=None if versions is None else torch.where(batch.mask.bool(), versions, 0),
                policy_version=batch.policy_version,
                checked=batch.checked,
            )
            batch = replace(batch, proximal_logprobs=proximal)
        inputs = prepare_inputs(logprobs, batch)
        result = self._apply_correction(inputs, _check_loss(self.loss, inputs, self._function(inputs, **self.options)))
        per_token, terms = self.regularizers.add(result.loss, inputs, batch.entropy, checked=batch.checked)
        assert self.aggregation is not None
        weights = token_weights(self.aggregation, inputs, dtype=per_token.dtype)
        return TokenTerms(per_token, weights, {**result.metrics, **terms}, inputs)

    def _apply_correction(self, inputs: LossInputs, result: TokenLoss) -> TokenLoss:
        if self.correction is None:
            return result
        if self._weighs_twice is not None and inputs.proximal_logprobs is None:
            raise ValueError(self._weighs_twice)
        weights, outside = correct_inputs(inputs, self.correction)
        metrics = {"correction_weight": weights, "corrected_fraction": outside}
        return TokenLoss(result.loss * weights, {**result.metrics, **metrics})


def _check_loss(name: str, inputs: LossInputs, result: TokenLoss) -> TokenLoss:
    """Check that a user's function satisfies the contract of the built-in losses."""
    if not isinstance(result, TokenLoss):
        raise ValueError(f"loss {name} must return a TokenLoss, got {type(result).__name__}")
    for what, tensor in {"loss": result.loss, **result.metrics}.items():
        if tensor.shape != inputs.mask.shape:
            raise ValueError(
                f"loss {name}: {what} must be per token, {list(inputs.mask.shape)}; got {list(tensor.shape)}"
            )
    if inputs.logprobs.requires_grad and not result.loss.requires_grad:
        raise ValueError(f"loss {name} does not depend on logprobs: it has no gradient")
    return result


def _metric_sums(inputs: LossInputs, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        mismatch = mismatch_kl(inputs.logprobs, inputs.inference_logprobs)
        per_token = {"mismatch_kl": mismatch, "mismatch_kl_max": mismatch, **metrics}
        if inputs.reference_logprobs is not None:
            per_token["reference_kl"] = kl_estimate("k3", inputs.logprobs, inputs.reference_logprobs)
        return {
            name: _reduce_metric(name, values.to(inputs.logprobs.dtype), inputs.mask)
            for name, values in per_token.items()
        } | _quarter_sums(inputs, mismatch)


def _quarter_sums(inputs: LossInputs, mismatch: Tensor) -> dict[str, Tensor]:
    """Return the sums and the tokens of `QUARTERS`. The host does not wait for the device."""
    earlier = torch.nn.functional.pad(inputs.mask.long().cumsum(0), (1, 0))
    at_boundaries = earlier[inputs.boundaries]
    tokens = at_boundaries.diff().clamp(min=1)[inputs.sequence_ids]
    quarters = 4 * (earlier[:-1] - at_boundaries[inputs.sequence_ids]) // tokens
    kept = (quarters == torch.arange(4, device=quarters.device)[:, None]) & inputs.mask
    sums, counts = torch.where(kept, mismatch, 0).sum(1), kept.sum(1).to(mismatch.dtype)
    return dict(zip(QUARTERS, sums, strict=True)) | dict(zip(QUARTERS.values(), counts, strict=True))


def _reduce_metric(name: str, values: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, values, 0)
    if name.endswith("_max"):
        return kept.amax() if kept.numel() else kept.sum()
    return kept.sum()


NO_REGULARIZERS = Regularizers()


def policy_loss(
    name: str,
    logprobs: Tensor,
    batch: LossBatch,
    *,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    regularizers: Regularizers = NO_REGULARIZERS,
    correction: Mapping[str, object] | None = None,
    **options: object,
) -> LossOutput:
    """Return the sum of a per-token loss over the loss mask, divided by the denominator.

    Args:
        name: loss of an `Objective`.
        logprobs: log-probs of the packed tokens under the current policy, `[T]`; with `batch.entropy` the only input with a gradient.
        batch: all other tensors.
        aggregation, aggregation_length, regularizers, correction, options: see `Objective`.

    Returns:
        Result of a call of the `Objective`.

    Raises:
        ValueError: an argument is misaligned, not finite, unknown or out of range; the message contains its name.
    """
    objective = Objective(
        name,
        options,
        aggregation=aggregation,
        aggregation_length=aggregation_length,
        regularizers=regularizers,
        correction=correction,
    )
    return objective(logprobs, batch)


def denominator_count(
    name: str,
    mask: Tensor,
    sequence_lengths: Sequence[int],
    *,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    **options: object,
) -> Tensor:
    """Return this batch's contribution to the denominator of `policy_loss`, a scalar; see `Objective.count`."""
    objective = Objective(name, options, aggregation=aggregation, aggregation_length=aggregation_length)
    return objective.count(mask, sequence_lengths)
