"""From samples to log-probabilities: one packed row at a time, and only the positions that are trained on."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from rlrun.trainer.learning.lm_head import Entropy, Head, find_head, logits_statistics
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.parallel.rows import RowPart, join, row_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenStatistics(NamedTuple):
    """Statistics of a row under the model, `[T]` fp32 each; 0 outside the loss mask."""

    logprobs: Tensor
    """Log-probability of the token; differentiable."""
    entropy: Tensor
    """Entropy of the distribution that the token was drawn from, in nats; differentiable only when asked for."""


def token_statistics(model: nn.Module, row: MicroBatch, *, entropy_gradient: bool = False) -> TokenStatistics:
    """Log-probability and entropy of every token in the loss mask, at the temperature it was sampled with.

    Only the positions before such a token go through the LM head, and their logits exist for a few tokens at a time
    (`trainer.lm_head`). A row without a loss token sends its first position through, so that every rank runs the same collectives,
    and uses nothing of it.
    """
    return _statistics(model, row, "gradient" if entropy_gradient else "value")


def token_logprobs(model: nn.Module, row: MicroBatch) -> Tensor:
    """The log-probabilities of `token_statistics` alone, which need fewer passes over the logits."""
    return _statistics(model, row, "none").logprobs


def weighted_statistics(model: nn.Module, row: MicroBatch, coefficients: Tensor) -> tuple[Tensor, TokenStatistics]:
    """The sum of `coefficients * logprobs` over this rank's targets, differentiable, and the statistics as constants.

    What a constant multiplies may be pulled back while the logits exist (`lm_head.weighted_logprobs`). `coefficients` is `[T]` fp32.
    """
    total, chosen, found, part = _computed(model, row, "value", coefficients)
    tokens = len(row.input_ids)
    return total, TokenStatistics(join(model, part, chosen.detach(), tokens), join(model, part, found.detach(), tokens))


def _statistics(model: nn.Module, row: MicroBatch, entropy: Entropy) -> TokenStatistics:
    _, chosen, found, part = _computed(model, row, entropy, None)
    tokens = len(row.input_ids)
    found = found if entropy == "gradient" else found.detach()
    return TokenStatistics(join(model, part, chosen, tokens), join(model, part, found, tokens))


def _computed(
    model: nn.Module, row: MicroBatch, entropy: Entropy, coefficients: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, RowPart]:
    """The weighted sum, log-probability and entropy of this rank's targets, and its part of the row."""
    part = row_part(model, row.input_ids, row.position_ids, row.packed, row.predicted)
    if model.__dict__.get("_prepared_for") is not type(model):  # FSDP changes the type when it shards
        _prepare(model)
    if coefficients is not None:
        coefficients = torch.where(part.counts, coefficients[part.targets], 0)
    return *model.row_statistics(_Wanted(row, part, entropy, coefficients)), part


def _prepare(model: PreTrainedModel) -> None:
    """Give the model a second forward method that FSDP gathers parameters for as for the first."""
    model._head = find_head(model)
    if model._head is None:
        logger.warning(f"{type(model).__name__} treats its logits in a way that is not known: its LM head is not fused")
    model.row_statistics = MethodType(_row_statistics, model)
    model._prepared_for = type(model)
    register_fsdp_forward_method(model, "row_statistics")


class _Wanted:
    """A row and this rank's part of it, and no dataclass: FSDP looks into those, and would round temperatures to the compute dtype."""

    def __init__(self, row: MicroBatch, part: RowPart, entropy: Entropy, coefficients: Tensor | None) -> None:
        self.row, self.part, self.entropy, self.coefficients = row, part, entropy, coefficients


def _row_statistics(model: PreTrainedModel, wanted: _Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum (0 without coefficients), log-probability and entropy of this rank's targets in the row, `[K]` fp32 each."""
    row, part, coefficients = wanted.row, wanted.part, wanted.coefficients
    inputs = {"input_ids": part.input_ids[None], "position_ids": part.position_ids[None], "packed": part.packed}
    targets, temperatures = row.input_ids[part.targets], row.temperatures[part.targets]
    head: Head | None = model._head
    if head is None:
        logits = type(model).forward(model, **inputs, logits_to_keep=part.before, use_cache=False).logits[0]
        logprobs, entropy = logits_statistics(logits, targets, temperatures)
    else:
        hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state[0, part.before]
        if coefficients is not None:
            weighted = head.weighted(hidden, targets, temperatures, coefficients)
            if weighted is not None:
                return weighted
        logprobs, entropy = head.statistics(hidden, targets, temperatures, entropy=wanted.entropy)
    total = logprobs.new_zeros(()) if coefficients is None else torch.linalg.vecdot(logprobs, coefficients)
    return total, logprobs, entropy
