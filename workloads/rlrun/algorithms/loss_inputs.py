"""Checked inputs of a policy loss: packed tensors of equal shape, finite, and neutral outside the loss mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlrun.algorithms.segments import reduce_segments, repeat_for_segments, segment_boundaries


@dataclass(frozen=True)
class LossBatch:
    """Inputs of a loss for one packed batch, except for the log-probs of the current policy. Only `entropy` may have a gradient.

    Raises no errors: `prepare_inputs` checks shapes and values together with the log-probs.
    """

    inference_logprobs: Tensor
    """Log-probs at sampling, at the same temperature, `[T]`."""
    advantages: Tensor
    """Advantages per token `[T]`, or per sequence `[S]`."""
    mask: Tensor
    """Loss mask, `[T]` bool (or 0 and 1). Other tokens have no effect, but must be finite."""
    sequence_lengths: Sequence[int]
    """S positive lengths with sum T."""
    denominator: float | Tensor | None = None
    """Divisor of the sum, normally `denominator_count` added up over all micro-batches and ranks. Default: the count of this batch."""
    entropy: Tensor | None = None
    """Entropies in nats, `[T]`, differentiable; for an entropy bonus."""
    reference_logprobs: Tensor | None = None
    """Log-probs of the reference, `[T]`; for `ref_kl`, `distill`, `masked_is` with a teacher_tau, a KL regularizer and the metric
    `reference_kl`.
    """
    proximal_logprobs: Tensor | None = None
    """Log-probs of the proximal policy, `[T]`; for clipped losses and `sapo` (default `inference_logprobs`), `decoupled_ppo` and a
    correction. An `Objective` computes missing ones by its method `proximal`.
    """
    versions: Tensor | None = None
    """Version that sampled each token, `[T]` integers; for the method `log_linear`."""
    policy_version: int | None = None
    """Version of the trained policy; for the method `log_linear`."""
    sequence_ids: Tensor | None = None
    """Index of each token's sequence, `[T]` int64, if it is on the device already."""
    checked: bool = False
    """The caller has checked the values, so the host does not wait for the device."""


@dataclass(frozen=True)
class LossInputs:
    """Checked inputs of one packed batch; every tensor is `[T]`, floating ones at least fp32.

    All log-probs and advantages are 0 outside `mask`, so that a masked token has ratio 1 and adds 0 to any sum of log-ratios. Only
    `logprobs` has a gradient.
    """

    logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    num_sequences: int
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """log ρ = t - i, `[T]`."""
        return self.logprobs - self.inference_logprobs

    @property
    def log_proximal_ratio(self) -> Tensor:
        """log r = t - o, `[T]`, with o = i if no proximal log-probs are given."""
        return self.log_ratio if self.proximal_logprobs is None else self.logprobs - self.proximal_logprobs

    @cached_property
    def boundaries(self) -> Tensor:
        """First token of each sequence and the number of tokens, `[num_sequences + 1]` int64."""
        return segment_boundaries(self.sequence_ids, self.num_sequences)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum over the loss tokens of each sequence: `[T]` -> `[num_sequences]`, in the same order in every call."""
        return reduce_segments("sum", torch.where(self.mask, values, 0), self.boundaries, self.sequence_ids)

    def sequence_max(self, values: Tensor) -> Tensor:
        """Maximum over the loss tokens of each sequence: `[T]` -> `[num_sequences]`; -inf for a sequence without loss tokens."""
        lowest = torch.where(self.mask, values, -torch.inf)
        return reduce_segments("max", lowest, self.boundaries, self.sequence_ids)

    def sequence_tokens(self) -> Tensor:
        """Return the number of loss tokens of each sequence, `[num_sequences]`."""
        return self.sequence_sum(torch.ones_like(self.inference_logprobs))

    def on_tokens(self, per_sequence: Tensor) -> Tensor:
        """Repeat the value of each sequence for its tokens: `[num_sequences]` -> `[T]`."""
        return repeat_for_segments(per_sequence, self.boundaries, self.sequence_ids)


def prepare_inputs(logprobs: Tensor, batch: LossBatch) -> LossInputs:
    """Align and check the inputs of a loss.

    The checks copy a few numbers from the device in one transfer, for any T. A caller that has checked the values on the host sets
    `checked`; with `sequence_ids` on the device, nothing is copied then.

    Raises:
        ValueError: an argument is invalid; the message contains its name.
    """
    _one_dimensional("logprobs", logprobs)
    lengths = checked_lengths(batch.sequence_lengths, logprobs.shape[0])
    ids = _sequence_ids(lengths, logprobs) if batch.sequence_ids is None else batch.sequence_ids
    advantages, mask = batch.advantages, batch.mask
    if advantages.shape == (len(lengths),):
        _same_device("advantages", advantages, logprobs)
        advantages = advantages[ids]
    constants = {
        "inference_logprobs": batch.inference_logprobs,
        "advantages": advantages,
        "proximal_logprobs": batch.proximal_logprobs,
        "reference_logprobs": batch.reference_logprobs,
    }
    given = {name: tensor for name, tensor in constants.items() if tensor is not None}
    for name, tensor in (given | {"mask": mask}).items():
        _check_shape(name, tensor, logprobs, len(lengths))

    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    floats = {"logprobs": logprobs.to(dtype)} | {name: x.detach().to(dtype) for name, x in given.items()}
    if not batch.checked:
        _check_values(floats, mask, batch.denominator)
    kept = mask.bool()
    neutral = {name: torch.where(kept, tensor, 0) for name, tensor in floats.items()}
    return LossInputs(mask=kept, sequence_ids=ids, num_sequences=len(lengths), **neutral)


def _sequence_ids(lengths: Sequence[int], like: Tensor) -> Tensor:
    """Return the index of each token's sequence, `[T]` int64."""
    numbers = torch.arange(len(lengths))
    repeats = torch.tensor(lengths, dtype=torch.long)
    return torch.repeat_interleave(numbers, repeats, output_size=like.shape[0]).to(like.device)


def checked_lengths(sequence_lengths: Sequence[int], total: int) -> list[int]:
    """Return the lengths as ints; raise ValueError unless they are positive and their sum is `total`."""
    lengths = [int(length) for length in sequence_lengths]
    if any(length < 1 for length in lengths):
        raise ValueError(f"sequence_lengths must be positive, got {min(lengths)}")
    if sum(lengths) != total:
        raise ValueError(f"sequence_lengths add up to {sum(lengths)}, but there are {total} tokens")
    return lengths


def _one_dimensional(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{name} must be packed, of shape [T]; got {tuple(tensor.shape)}")


def _same_device(name: str, tensor: Tensor, logprobs: Tensor) -> None:
    if tensor.device != logprobs.device:
        raise ValueError(f"{name} is on {tensor.device}, logprobs on {logprobs.device}")


def _check_shape(name: str, tensor: Tensor, logprobs: Tensor, num_sequences: int) -> None:
    if tensor.shape != logprobs.shape:
        wanted = f"[{logprobs.shape[0]}]" + (f" or [{num_sequences}]" if name == "advantages" else "")
        raise ValueError(f"{name} must have shape {wanted}, got {list(tensor.shape)}")
    _same_device(name, tensor, logprobs)


def _check_values(floats: dict[str, Tensor], mask: Tensor, denominator: float | Tensor | None) -> None:
    """Check for non-finite values, a mask with other values than 0 and 1, and an invalid denominator, with one transfer.

    A sum of finite terms is finite unless it overflows, so terms are checked one by one only if their sum is not finite.
    """
    not_binary = (mask * (1 - mask)).abs().sum() if mask.dtype != torch.bool else mask.new_zeros(())
    per_batch = torch.as_tensor(0.0 if denominator is None else denominator).detach()
    if per_batch.numel() != 1:
        raise ValueError(f"denominator must be one number, got shape {list(per_batch.shape)}")
    sums = [tensor.detach().sum() for tensor in floats.values()]
    numbers = [not_binary, mask.sum(), per_batch.to(mask.device).reshape(()), *sums]
    wrong_mask, tokens, divisor, *totals = torch.stack([number.double() for number in numbers]).tolist()
    for (name, tensor), total in zip(floats.items(), totals, strict=True):
        if not math.isfinite(total) and not bool(torch.isfinite(tensor).all()):
            where = int((~torch.isfinite(tensor)).nonzero()[0])
            raise ValueError(f"{name} is not finite: {tensor[where].item()} at token {where}")
    if wrong_mask != 0:
        raise ValueError("mask must be boolean, or contain only 0 and 1")
    if denominator is not None and (not math.isfinite(divisor) or divisor < 0 or (divisor == 0 and tokens > 0)):
        raise ValueError(f"denominator must be a positive number, got {divisor} for {tokens:.0f} loss tokens")
