"""`policy_loss`: look a loss up, apply it to a packed batch, reduce it to one scalar and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.custom import bind, builtins
from rlrun.algorithms.inputs import LossInputs, checked_lengths, prepare
from rlrun.algorithms.kl import kl_estimate, mismatch_kl
from rlrun.algorithms.losses import FUNCTIONS, TokenLoss

LOSSES = builtins("loss", FUNCTIONS)


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
    **options: Any,
) -> LossOutput:
    """The sum of a per-token loss over the loss mask, divided by `denominator`.

    Args:
        name: a key of `LOSSES`, or `package.module:function`, called as `function(LossInputs, **options)` and
            returning a `TokenLoss`.
        logprobs: `[T]` log-probs of the packed tokens under the current policy; the only input with a gradient.
        inference_logprobs: `[T]`, as sampled, at the same temperature.
        advantages: `[T]`, or one per sequence `[S]`.
        mask: `[T]` bool (or 0 and 1), true on tokens to train on. The others change nothing, whatever they hold,
            as long as it is finite.
        sequence_lengths: S positive lengths that add up to T.
        proximal_logprobs: `[T]`, read by `ppo` and `gspo`; default `inference_logprobs`.
        reference_logprobs: `[T]`, read by `masked_is` with a teacher_tau, and for the metric `kl`.
        denominator: what the sum is divided by, normally `denominator_count` added up over all micro-batches and
            ranks; default: that of this batch alone.
        options: of the loss, see `LOSSES[name].options`.

    Returns:
        The loss (0 with a zero gradient if there is no loss token) and sums over the loss tokens: `tokens`,
        `sequences`, `mismatch_kl`, `ratio`, `clip_fraction` or `dropped_fraction`, `kl` (k3, given a reference), and
        the maxima `ratio_max` and `mismatch_kl_max`. Divide the sums by `tokens` after adding up (`mean_metrics`).

    Raises:
        ValueError: names the argument that is misaligned, not finite, unknown or out of range.
    """
    function, complete = bind("loss", name, LOSSES, options)
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
    token_loss = _checked(name, inputs, function(inputs, **complete))
    total = torch.where(inputs.mask, token_loss.loss, 0).sum()
    tokens, sequences = inputs.mask.sum(), (inputs.sequence_tokens() > 0).sum()
    if denominator is None:
        denominator = sequences if _counts_sequences(name, complete) else tokens
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device).detach().reshape(())
    loss = total / torch.where(divisor > 0, divisor, 1)
    return LossOutput(
        loss, {"tokens": tokens.to(total.dtype), "sequences": sequences.to(total.dtype)} | _summed(inputs, token_loss)
    )


def denominator_count(name: str, mask: Tensor, sequence_lengths: Sequence[int], **options: Any) -> Tensor:
    """What this batch adds to the denominator of `policy_loss(name, ..., **options)`, a scalar.

    The loss tokens; for `masked_is` with `ratio="sequence"` the sequences that have a loss token.
    """
    _, complete = bind("loss", name, LOSSES, options)
    lengths = checked_lengths(sequence_lengths, mask.shape[0])
    kept = mask.bool()
    if not _counts_sequences(name, complete):
        return kept.sum()
    return torch.stack([part.any() for part in kept.split(lengths)]).sum() if lengths else kept.sum()


def _counts_sequences(name: str, options: dict[str, Any]) -> bool:
    return name == "masked_is" and options["ratio"] == "sequence"


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


def _summed(inputs: LossInputs, token_loss: TokenLoss) -> dict[str, Tensor]:
    with torch.no_grad():
        mismatch = mismatch_kl(inputs.logprobs, inputs.inference_logprobs)
        per_token = {"mismatch_kl": mismatch, "mismatch_kl_max": mismatch, **token_loss.metrics}
        if inputs.reference_logprobs is not None:
            per_token["kl"] = kl_estimate("k3", inputs.logprobs, inputs.reference_logprobs)
        return {
            name: _reduced(name, values.to(inputs.logprobs.dtype), inputs.mask) for name, values in per_token.items()
        }


def _reduced(name: str, values: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, values, 0)
    if name.endswith("_max"):
        return kept.amax() if kept.numel() else kept.sum()
    return kept.sum()
