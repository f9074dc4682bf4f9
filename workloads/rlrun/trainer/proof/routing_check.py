"""Check that routes of a mixture can be replayed: on a small model, own routes give the same bits and other routes other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlrun.fit.architecture import EXPERTS
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.recurrent import Packing, divide_mixers, pass_rows
from rlrun.trainer.modeling.router_replay import (
    Routing,
    close_routes,
    find_routers,
    pass_routes,
    set_routing,
    wrap_routers,
)
from rlrun.trainer.modeling.shard import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_ROUTERS = "it has no routers"
"""Reason for a model without experts."""


def find_routing_fault(small: PreTrainedModel, rows: Sequence[MicroBatch], packing: Packing) -> str | None:
    """Return why routes of such models cannot be replayed, or None.

    Args:
        small: small model with packed attention, in training mode; it is changed.
        rows: rows to compute, each as the packing requires.
        packing: packing of the model's rows.
    """
    layers = decoder_layers(small)
    try:
        routing = set_routing(small, layers)
        if routing is None:
            return _explain_missing(small)
        if packing == "mixer":
            divide_mixers(layers)
        wrap_routers(small, layers)
        if packing == "mixer":
            pass_rows(small, layers)
        pass_routes(small, layers)
        return _compare_routes(small, routing, rows)
    except TimeoutError:  # a deadline of the caller
        raise
    except Exception as error:  # the architecture's code may raise any error
        lines = str(error).strip().splitlines() or ["no message"]
        return f"{type(error).__name__}: {lines[0]}"


def _explain_missing(small: PreTrainedModel) -> str:
    config = small.config.get_text_config()
    mixed = any((getattr(config, name, None) or 0) > 1 for name in EXPERTS)
    return "its layers have no router of a known kind" if mixed else NO_ROUTERS


def _compare_routes(small: PreTrainedModel, routing: Routing, rows: Sequence[MicroBatch]) -> str | None:
    shape = routing.shape
    native, gradients, chosen = _compute_rows(small, routing, rows)
    replayed, again, repeated = _compute_rows(small, routing, _with_routes(rows, chosen, routing))
    if not all(map(torch.equal, chosen, repeated)):
        return "its routers choose other experts than the replayed ones"
    if not torch.equal(replayed, native):
        error = float((replayed - native).abs().max())
        return f"with its own routes replayed, log-probabilities differ by {error:.2g} (allowed: 0)"
    if not all(map(torch.equal, gradients, again)):
        return "with its own routes replayed, the gradients of its routers differ"
    if shape.experts == shape.top_k:
        return None
    others = [(routes + 1) % shape.experts for routes in chosen]
    changed, _, found = _compute_rows(small, routing, _with_routes(rows, others, routing))
    if not all(map(torch.equal, others, found)) or torch.equal(changed, native):
        return "replayed routes have no effect on its log-probabilities"
    return None


def _with_routes(rows: Sequence[MicroBatch], routes: Sequence[Tensor], routing: Routing) -> list[MicroBatch]:
    return [replace(row, routes=close_routes(own, routing.shape)) for row, own in zip(rows, routes, strict=True)]


def _compute_rows(
    small: PreTrainedModel, routing: Routing, rows: Sequence[MicroBatch]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return log-probabilities `[T]`, gradients of the routers' parameters, and the chosen experts of each row."""
    small.zero_grad()
    routing.record = True
    logprobs, chosen = [], []
    for row in rows:
        logprobs.append(token_statistics(small, row).logprobs)
        chosen.append(routing.chosen_routes())
    joined = torch.cat(logprobs)
    joined.square().sum().backward()
    return (
        joined.detach(),
        [parameter.grad.clone() for parameter in _router_parameters(small) if parameter.grad is not None],
        chosen,
    )


def _router_parameters(small: PreTrainedModel) -> list[nn.Parameter]:
    return [
        parameter
        for layer in decoder_layers(small)
        for router in find_routers(layer)
        for parameter in router.parameters()
    ]
