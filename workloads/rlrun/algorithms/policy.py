"""`policy_loss`: look a loss up, apply it to a packed batch, reduce it to one scalar and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms import losses
from rlrun.algorithms.aggregation import aggregation_count, aggregation_weights, check_aggregation
from rlrun.algorithms.correction import corrected
from rlrun.algorithms.inputs import LossInputs, prepare
from rlrun.algorithms.kl import kl_estimate, mismatch_kl
from rlrun.algorithms.losses import TokenLoss
from rlrun.algorithms.regularizers import Regularizers
from rlrun.config.algorithm_names import LOSS_ENTRIES, complete_correction, correction_problem, default_aggregation
from rlrun.custom import Algorithm, bind

LOSSES: Mapping[str, Algorithm] = {
    name: Algorithm(getattr(losses, entry.function or name), entry.options) for name, entry in LOSS_ENTRIES.items()
}
"""The built-in losses: the functions of `losses` that the table declares."""
NO_REGULARIZERS = Regularizers()


class LossOutput(NamedTuple):
    """`loss`: differentiable scalar. `metrics`: detached scalars on the device of the loss, see `metrics.py`."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    name: str,
    logprobs: Tensor,
    *,
    inference_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_lengths: Sequence[int],
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    denominator: float | Tensor | None = None,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    regularizers: Regularizers = NO_REGULARIZERS,
    entropy: Tensor | None = None,
    correction: Mapping[str, Any] | None = None,
    **options: Any,
) -> LossOutput:
    """The sum of a per-token loss over the loss mask, divided by `denominator`.

    Args:
        name: a key of `LOSSES`, or `package.module:function`, called as `function(LossInputs, **options)` and
            returning a `TokenLoss`.
        logprobs: `[T]` log-probs of the packed tokens under the current policy; with `entropy` the only input with a gradient.
        inference_logprobs: `[T]`, as sampled, at the same temperature.
        advantages: `[T]`, or one per sequence `[S]`.
        mask: `[T]` bool (or 0 and 1), true on tokens to train on. The others change nothing, whatever they hold,
            as long as it is finite.
        sequence_lengths: S positive lengths that add up to T.
        proximal_logprobs: `[T]`, read by `ppo`, `gspo` (default `inference_logprobs`), `decoupled_ppo` and a correction.
        reference_logprobs: `[T]`, read by `ref_kl`, `distill`, `masked_is` with a teacher_tau, a KL regulariser, and for the metric
            `reference_kl`.
        denominator: what the sum is divided by, normally `denominator_count` added up over all micro-batches and
            ranks; default: that of this batch alone.
        aggregation: a key of `AGGREGATIONS`; default: that of the loss, see `default_aggregation`.
        aggregation_length: tokens, for `constant_length`.
        regularizers: terms that are added to the loss of each token before the aggregation.
        entropy: `[T]` nats, differentiable; for an entropy bonus.
        correction: options of `correct_mismatch`, whose weights multiply the loss of each token (not the regularisers).
        options: of the loss, see `LOSSES[name].options`.

    Returns:
        The loss (0 with a zero gradient if there is no loss token) and sums over the loss tokens: `tokens`,
        `sequences`, `mismatch_kl`, `ratio`, `clip_fraction` or `dropped_fraction`, given a reference `reference_kl` (k3), with a correction
        `correction_weight` and `corrected_fraction`, and the maxima `ratio_max` and `mismatch_kl_max`. Divide the sums by `tokens`
        after adding up (`mean_metrics`).

    Raises:
        ValueError: names the argument that is misaligned, not finite, unknown or out of range.
    """
    function, complete = bind("loss", name, LOSSES, options)
    aggregation = aggregation or default_aggregation(name, complete)
    check_aggregation(aggregation, aggregation_length)
    inputs = prepare(
        logprobs,
        inference_logprobs=inference_logprobs,
        advantages=advantages,
        mask=mask,
        sequence_lengths=sequence_lengths,
        proximal_logprobs=proximal_logprobs,
        reference_logprobs=reference_logprobs,
        denominator=denominator,
    )
    result = _checked(name, inputs, function(inputs, **complete))
    if correction is not None:
        result = _corrected(name, inputs, result, correction)
    per_token, terms = regularizers.add(result.loss, inputs, entropy)
    weights = aggregation_weights(aggregation, inputs.mask, sequence_lengths, dtype=per_token.dtype)
    total = (torch.where(inputs.mask, per_token, 0) * weights).sum()
    if denominator is None:
        denominator = aggregation_count(aggregation, inputs.mask, sequence_lengths, length=aggregation_length)
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device).detach().reshape(())
    counts = {"tokens": inputs.mask.sum(), "sequences": (inputs.sequence_tokens() > 0).sum()}
    return LossOutput(
        total / torch.where(divisor > 0, divisor, 1),
        {key: count.to(total.dtype) for key, count in counts.items()} | _summed(inputs, {**result.metrics, **terms}),
    )


def denominator_count(
    name: str,
    mask: Tensor,
    sequence_lengths: Sequence[int],
    *,
    aggregation: str | None = None,
    aggregation_length: float | None = None,
    **options: Any,
) -> Tensor:
    """Share of this batch in the denominator of `policy_loss(name, ..., **options)`, a scalar.

    The loss tokens for `token_mean`, else the sequences that have a loss token, for `constant_length` times that length.
    """
    _, complete = bind("loss", name, LOSSES, options)
    aggregation = aggregation or default_aggregation(name, complete)
    return aggregation_count(aggregation, mask, sequence_lengths, length=aggregation_length)


def _corrected(name: str, inputs: LossInputs, result: TokenLoss, correction: Mapping[str, Any]) -> TokenLoss:
    complete = complete_correction(correction)
    if problem := correction_problem(complete, name, has_proximal=inputs.proximal_logprobs is not None):
        raise ValueError(problem)
    weights, outside = corrected(inputs, complete)
    metrics = {"correction_weight": weights, "corrected_fraction": outside}
    return TokenLoss(result.loss * weights, {**result.metrics, **metrics})


def _checked(name: str, inputs: LossInputs, result: TokenLoss) -> TokenLoss:
    """A user's function is held to the contract of the built-in ones."""
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


def _summed(inputs: LossInputs, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        mismatch = mismatch_kl(inputs.logprobs, inputs.inference_logprobs)
        per_token = {"mismatch_kl": mismatch, "mismatch_kl_max": mismatch, **metrics}
        if inputs.reference_logprobs is not None:
            per_token["reference_kl"] = kl_estimate("k3", inputs.logprobs, inputs.reference_logprobs)
        return {
            name: _reduced(name, values.to(inputs.logprobs.dtype), inputs.mask) for name, values in per_token.items()
        }


def _reduced(name: str, values: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, values, 0)
    if name.endswith("_max"):
        return kept.amax() if kept.numel() else kept.sum()
    return kept.sum()
