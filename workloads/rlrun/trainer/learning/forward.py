"""Forward passes of packed rows to log-probabilities, for trained positions only.

Passes without a gradient cover a batch before the first update of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from rlrun.trainer.learning.lm_head import Entropy, Head, find_head, logits_statistics
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.parallel.pipeline import run_rows
from rlrun.trainer.modeling.parallel.pipeline_stages import last_stage, one_stage, stage_of
from rlrun.trainer.modeling.parallel.sharded_rows import RowPart, join_rows, part_tokens, row_part
from rlrun.trainer.modeling.router_replay import close_routes, routing_of
from rlrun.trainer.modeling.shard import fsdp_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenStatistics(NamedTuple):
    """Statistics of a row under the model, each `[T]` fp32 and 0 outside the loss mask."""

    logprobs: Tensor
    """Log-probability of the token; differentiable."""
    entropy: Tensor
    """Entropy of the token's distribution in nats; differentiable only if requested."""


def token_statistics(
    model: nn.Module, row: MicroBatch, *, entropy_gradient: bool = False, received: Tensor | None = None
) -> TokenStatistics:
    """Compute log-probability and entropy of every loss token at its sampling temperature.

    Only the positions before loss tokens pass through the LM head, and their logits exist for a few tokens at a time (`lm_head`). For a
    row without loss tokens the first position is computed and ignored, so that every rank runs the same collectives. `received` is the
    previous stage's output for the row, on the last stage of a pipeline.
    """
    return _target_statistics(model, row, "gradient" if entropy_gradient else "value", received)


def token_logprobs(model: nn.Module, row: MicroBatch, *, received: Tensor | None = None) -> Tensor:
    """Compute only the log-probabilities of `token_statistics`, with fewer passes over the logits."""
    return _target_statistics(model, row, "none", received).logprobs


def rows_logprobs(model: nn.Module, rows: Sequence[MicroBatch]) -> list[Tensor]:
    """Compute `token_logprobs` of all rows without gradients; in a pipeline the ranks of all stages get the result."""
    stage = stage_of(model)
    with torch.no_grad():
        if stage is None:
            return [token_logprobs(model, row) for row in rows]
        found: list[Tensor] = []

        def compute(number: int, index: int, received: Tensor | None) -> Tensor:
            if not stage.computes_loss(number):
                return stage_output(model, rows[index], received, number)
            found.append(token_logprobs(model, rows[index], received=received))
            return found[-1].sum()

        lengths = [len(row.input_ids) for row in rows]
        run_rows(model, stage, [part_tokens(model, length) for length in lengths], compute, backward=False)
        whole = torch.cat(found) if found else rows[0].advantages.new_empty(sum(lengths))
        dist.broadcast(whole, group=stage.group, group_src=stage.head_place)
        return list(whole.split(lengths))


def stage_output(model: nn.Module, row: MicroBatch, received: Tensor | None, number: int) -> Tensor:
    """Compute the hidden states of this rank's part of a row after a stage's layers, `[P, D]`; not for the last stage.

    Args:
        model: stages of this rank.
        row: complete row.
        received: output of the previous stage, `[P, D]`; None on the first stage.
        number: number of the stage.
    """
    part = _divide_row(model, row)
    _prepare_once(model)
    output: Tensor = model.row_hidden(_Wanted(row, part, "none", None, received), number)
    return output[0]


def weighted_statistics(
    model: nn.Module, row: MicroBatch, coefficients: Tensor, *, received: Tensor | None = None
) -> tuple[Tensor, TokenStatistics]:
    """Return the differentiable sum of `coefficients * logprobs` over this rank's targets, and the statistics as constants.

    With constant coefficients (`[T]` fp32) the backward pass can run while the logits exist (`lm_head.weighted_logprobs`).
    """
    total, chosen, found, part = _compute_targets(model, row, "value", coefficients, received)
    tokens = len(row.input_ids)
    return total, TokenStatistics(
        join_rows(model, part, chosen.detach(), tokens), join_rows(model, part, found.detach(), tokens)
    )


def _target_statistics(model: nn.Module, row: MicroBatch, entropy: Entropy, received: Tensor | None) -> TokenStatistics:
    _, chosen, found, part = _compute_targets(model, row, entropy, None, received)
    tokens = len(row.input_ids)
    found = found if entropy == "gradient" else found.detach()
    return TokenStatistics(join_rows(model, part, chosen, tokens), join_rows(model, part, found, tokens))


def _compute_targets(
    model: nn.Module, row: MicroBatch, entropy: Entropy, coefficients: Tensor | None, received: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, RowPart]:
    """Compute the weighted sum, log-probability and entropy of this rank's targets; also return its part of the row."""
    part = _divide_row(model, row)
    _prepare_once(model)
    if coefficients is not None:
        coefficients = torch.where(part.counts, coefficients[part.targets], 0)
    return *model.row_statistics(_Wanted(row, part, entropy, coefficients, received)), part


def _divide_row(model: nn.Module, row: MicroBatch) -> RowPart:
    return row_part(
        model,
        row.input_ids,
        row.position_ids,
        row.packed,
        row.predicted,
        routes=row.routes,
        routes_divided=row.routes_divided,
    )


def _prepare_once(model: nn.Module) -> None:
    if model.__dict__.get("_prepared_for") is not type(model):  # FSDP changes the class of the model when it shards
        _prepare_model(model)


def _prepare_model(model: PreTrainedModel) -> None:
    """Add forward methods to the model, and register them so that FSDP gathers parameters for them."""
    stage = stage_of(model)
    model._prepared_for = type(model)
    if stage is not None:
        model.row_hidden = MethodType(_row_hidden, model)
        register_fsdp_forward_method(model, "row_hidden")
    if stage is not None and not stage.last:
        return
    model._head = find_head(model)
    if model._head is None:
        logger.warning(f"{type(model).__name__} transforms its logits in an unknown way; the fused LM head is disabled")
    elif stage is not None:
        model._head = replace(model._head, waits=True)
    model.row_statistics = MethodType(_row_statistics, model)
    register_fsdp_forward_method(model, "row_statistics")


class _Wanted:
    """Arguments of the added forward methods. Not a dataclass, because FSDP casts fields of dataclasses, so temperatures would lose
    precision.
    """

    def __init__(
        self,
        row: MicroBatch,
        part: RowPart,
        entropy: Entropy,
        coefficients: Tensor | None,
        received: Tensor | None,
    ) -> None:
        self.row, self.part, self.entropy, self.coefficients, self.received = (
            row,
            part,
            entropy,
            coefficients,
            received,
        )

    @property
    def inputs(self) -> dict[str, object]:
        """Keyword arguments of the decoder."""
        start = {"input_ids": self.part.input_ids[None]}
        if self.received is not None:
            start = {"inputs_embeds": self.received[None]}
        return start | {"position_ids": self.part.position_ids[None], "packed": self.part.packed}


def _row_hidden(model: PreTrainedModel, wanted: _Wanted, number: int) -> Tensor:
    """Compute the hidden states of this rank's part of the row after a stage before the last, `[1, P, D]`."""
    with one_stage(model, number):
        hidden: Tensor = model.get_decoder()(**wanted.inputs, use_cache=False).last_hidden_state
    return hidden


def _row_statistics(model: PreTrainedModel, wanted: _Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weighted sum (0 without coefficients), and log-probability and entropy of this rank's targets, `[K]` fp32 each."""
    row, part, coefficients = wanted.row, wanted.part, wanted.coefficients
    targets, temperatures = row.input_ids[part.targets], row.temperatures[part.targets]
    head: Head | None = model._head
    if head is None:
        with last_stage(model):
            logits = type(model).forward(model, **wanted.inputs, logits_to_keep=part.before, use_cache=False).logits[0]
        logprobs, entropy = logits_statistics(logits, targets, temperatures)
    else:
        with last_stage(model):
            hidden = model.get_decoder()(**wanted.inputs, use_cache=False).last_hidden_state[0, part.before]
        if coefficients is not None:
            weighted = head.weighted_logprobs(hidden, targets, temperatures, coefficients)
            if weighted is not None:
                return weighted
        logprobs, entropy = head.statistics(hidden, targets, temperatures, entropy=wanted.entropy)
    total = logprobs.new_zeros(()) if coefficients is None else torch.linalg.vecdot(logprobs, coefficients)
    return total, logprobs, entropy


@dataclass(frozen=True)
class Signals:
    """Auxiliary inputs of one row, each `[T]` fp32 and 0 outside the loss mask, or None if the objective does not read it."""

    proximal_logprobs: Tensor | None = None
    """Log-probs of the proximal policy."""
    reference_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    """Advantages that replace the batch's, computed by a critic or with a KL reward."""
    values: Tensor | None = None
    """Critic's values at the start of the step."""
    returns: Tensor | None = None
    """Targets of the critic."""


class ReferenceSource(Protocol):
    """Source of log-probs of a reference or teacher: a model in the trainer, or an engine."""

    def logprobs(self, rows: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens of each row at their sampling temperature, `[T]` fp32, 0 outside the mask.

        All ranks call it together, with the same number of rows.
        """
        ...


def logprobs_without_gradient(model: nn.Module, rows: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the log-probs of the loss tokens of each row under `model`, `[T]` fp32, 0 outside the mask."""
    found = rows_logprobs(model, rows)
    release_gathered(model)
    return found


def record_routes(model: nn.Module, rows: Sequence[MicroBatch]) -> tuple[list[Tensor], list[MicroBatch]]:
    """Compute `logprobs_without_gradient`, and return the rows with the experts of this pass as their routes.

    Raises:
        ValueError: the model has no routing, or several pipeline stages.
    """
    routing = routing_of(model)
    if routing is None or stage_of(model) is not None:
        raise ValueError(f"{type(model).__name__} cannot record routes")
    found: list[Tensor] = []
    recorded: list[MicroBatch] = []
    routing.record = True
    try:
        with torch.no_grad():
            for row in rows:
                found.append(token_logprobs(model, row))
                routes = close_routes(routing.chosen_routes(), routing.shape)
                recorded.append(replace(row, routes=routes, routes_divided=True))
    finally:
        routing.record = False
    release_gathered(model)
    return found, recorded


def release_gathered(model: nn.Module) -> None:
    """Free the parameters that FSDP has gathered for a forward pass without a backward pass.

    FSDP keeps the root's parameters for the backward pass, and on a single rank also those of layers. Without this call the next pass
    computes with these old values, even after an optimizer step.
    """
    units: list[Any] = fsdp_modules(model)
    for unit in units:
        unit.reshard()
