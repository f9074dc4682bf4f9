"""Balance of a mixture's experts: their load, an auxiliary loss per sequence, and the update of correction biases.

The auxiliary loss of a layer and a sequence is the load-balancing loss of the Switch Transformer (arXiv:2101.03961) with several chosen
experts, `experts * sum_e share_e * probability_e`: `share_e` is the number of the sequence's choices of expert e divided by its tokens, and
`probability_e` the mean of the router's probabilities, the softmax of its logits or, for routers with a sigmoid, the normalized sigmoid.
The step's loss is the coefficient times the mean over layers and sequences. It does not depend on the packing or on the number of ranks,
because no sum crosses the end of a sequence. Shares are constants, so the gradient on the logits is known in the router and needs no path
to the objective.

The correction bias (arXiv:2408.15664) changes only the choice of experts, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.protocol.files.routes import RouteShape

BIAS = "e_score_correction_bias"
"""Name of the correction bias in the routers of transformers, or in the block of a router."""
_OWNER = "_rlrun_bias_owner"


class RouteCounts:
    """Sums over the rows of a step on this rank, on its device.

    Args:
        shape: size of the model's routes.
        device: device of the layers.
    """

    def __init__(self, shape: RouteShape, device: torch.device) -> None:
        self.load = torch.zeros(shape.layers, shape.experts, dtype=torch.int64, device=device)
        """Tokens of each expert, `[L, E]`."""
        self.tokens = torch.zeros(3, dtype=torch.int64, device=device)
        """Routed tokens of all layers, replayed ones, and replayed ones whose native experts differ."""
        self.aux_loss = torch.zeros((), dtype=torch.float64, device=device)
        """Auxiliary loss without the coefficient, a sum of means over the sequences of each update."""

    def add(self, layer: int, native: Tensor, chosen: Tensor, missing: Tensor | None, real: Tensor | None) -> None:
        """Add the tokens of one layer; `real [T]` excludes padding."""
        counted = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device) if real is None else real
        weights = counted[:, None].expand_as(chosen).to(torch.int64)
        self.load[layer].index_add_(0, chosen.flatten(), weights.flatten())
        self.tokens[0] += counted.sum()
        if missing is not None:
            replayed = counted & ~missing[:, 0]
            differs = (native.sort(dim=-1).values != chosen.sort(dim=-1).values).any(-1)
            self.tokens[1] += replayed.sum()
            self.tokens[2] += (replayed & differs).sum()

    def add_ranks(self, *, with_loss: bool) -> None:
        """Add the sums of all ranks, on the CPU; all ranks call it together. Tensor ranks count the same tokens, which changes no share.

        Args:
            with_loss: true if an auxiliary loss is computed.
        """
        # On the CPU, so that the collective does not wait for kernels in the queue of the device.
        total, loss = torch.cat([self.tokens, self.load.flatten()]).cpu(), self.aux_loss.cpu()
        if dist.is_initialized():
            dist.all_reduce(total)
            if with_loss:
                dist.all_reduce(loss)
        self.tokens, self.load, self.aux_loss = total[:3], total[3:].view_as(self.load), loss

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the sums.

        Returns:
            `routing/replayed_share`: share of routed tokens with a replayed route; `routing/changed_share`: share of replayed routes whose
            experts differ from the router's own; `routing/max_violation`: (largest load - mean load) / mean load of the worst layer.
            Without routed tokens the result is empty.
        """
        routed, replayed, changed = self.tokens.tolist()
        if not routed:
            return {}
        load = self.load.double()
        load = load[load.sum(-1) > 0]
        mean = load.mean(-1)
        return {
            "routing/replayed_share": replayed / routed,
            "routing/changed_share": changed / max(replayed, 1),
            "routing/max_violation": float(((load.max(-1).values - mean) / mean).max()),
        }


@dataclass(frozen=True)
class Balance:
    """Auxiliary loss of an update.

    Args:
        coefficient: factor of the loss.
        sequences: sequences of the update on all ranks.
    """

    coefficient: float
    sequences: int


@dataclass
class RowBalance:
    """Auxiliary loss of one row on this rank.

    Args:
        balance: loss of the update.
        layers: layers with a router.
        lengths: tokens of each sequence of the whole row, `[S]` float32.
        sequences: sequence of each token of this rank's part, `[P]` int64.
        real: tokens that are not padding, `[P]` bool. Default: all.
        group: context ranks that have the other tokens of the row. Default: none.
    """

    balance: Balance
    layers: int
    lengths: Tensor
    sequences: Tensor
    real: Tensor | None = None
    group: dist.ProcessGroup | None = None
    _slopes: dict[int, Tensor] = field(default_factory=dict)

    def slopes(self, layer: int, chosen: Tensor, experts: int) -> Tensor:
        """Return the derivative of the mean loss by the probabilities of each sequence's tokens, `[S, E]` float32.

        A recomputation gets the result of the first pass, without a second collective.

        Args:
            layer: number of the layer among layers with a router.
            chosen: experts of the part's tokens, `[P, K]` int64.
            experts: experts of the layer.
        """
        if layer not in self._slopes:
            counts = torch.zeros(len(self.lengths), experts, dtype=torch.float32, device=chosen.device)
            places = self.sequences[:, None] * experts + chosen
            weights = torch.ones_like(places, dtype=torch.float32)
            if self.real is not None:
                weights = weights * self.real[:, None]
            counts.view(-1).index_add_(0, places.flatten(), weights.flatten())
            if self.group is not None:
                dist.all_reduce(counts, group=self.group)
            tokens = self.lengths[:, None]
            self._slopes[layer] = counts * (experts / (self.layers * self.balance.sequences)) / tokens / tokens
        return self._slopes[layer]

    def token_slopes(self, slopes: Tensor) -> Tensor:
        """Return the rows of `slopes` for each token, `[P, E]`; 0 for padding."""
        found = slopes[self.sequences]
        return found if self.real is None else found * self.real[:, None]


class PendingLoss:
    """Auxiliary loss of a router's call, between its logits and its choice.

    Args:
        row: loss of the row.
    """

    def __init__(self, row: RowBalance) -> None:
        self.row = row
        self.logits: Tensor | None = None
        """Logits of the router, `[P, E]`; None until they are computed."""
        self.sigmoid = False
        """Whether the router applies a sigmoid to its logits."""
        self.slopes: Tensor | None = None

    def keep_logits(self, logits: Tensor) -> Tensor:
        """Return the logits with the gradient of the loss."""
        self.logits = logits.detach()
        found: Tensor = _AddGradient.apply(logits, self)  # type: ignore[no-untyped-call]
        return found

    def finish(self, layer: int, chosen: Tensor) -> Tensor:
        """Set the chosen experts, `[P, K]`, and return this rank's part of the mean loss, without the coefficient."""
        assert self.logits is not None
        self.slopes = self.row.slopes(layer, chosen, self.logits.shape[1])
        probabilities, _ = self.probabilities(self.logits)
        value = (self.row.token_slopes(self.slopes) * probabilities).sum()
        self.logits = None  # the graph keeps them, or computes them again
        return value

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities, `[P, E]` float32, and the derivative of each unnormalized score divided by their sum."""
        logits = logits.float()
        if not self.sigmoid:
            found = logits.softmax(-1)
            return found, found
        scores = logits.sigmoid()
        total = scores.sum(-1, keepdim=True)
        return scores / total, scores * (1 - scores) / total


class _AddGradient(torch.autograd.Function):
    """Identity of a router's logits, whose backward pass adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, pending: PendingLoss) -> Tensor:
        ctx.pending = pending
        ctx.save_for_backward(logits)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pending: PendingLoss = ctx.pending
        assert pending.slopes is not None
        (logits,) = ctx.saved_tensors
        slopes = pending.row.token_slopes(pending.slopes)
        probabilities, derivative = pending.probabilities(logits)
        own = derivative * (slopes - (probabilities * slopes).sum(-1, keepdim=True))
        return gradient + pending.row.balance.coefficient * own.to(gradient.dtype), None


def remember_bias(router: nn.Module, layer: nn.Module) -> str | None:
    """Store the owner of a router's correction bias; return why it cannot be updated, or None.

    Args:
        router: router of the layer.
        layer: decoder layer.
    """
    owners = [module for module in layer.modules() if BIAS in module._buffers]
    if len(owners) == 1:
        router.__dict__[_OWNER] = owners[0]
        return None
    if any(BIAS in module._parameters for module in layer.modules()):
        return f"{type(router).__name__} keeps its correction bias as a parameter"
    return f"{type(router).__name__} has no correction bias ({BIAS})"


def bias_of(router: nn.Module) -> Tensor | None:
    """Return the correction bias of a router with `remember_bias`, `[E]`, or None."""
    owner = router.__dict__.get(_OWNER)
    return None if owner is None else owner.get_buffer(BIAS)


def update_biases(routers: Sequence[tuple[int, nn.Module]], load: Tensor, rate: float) -> None:
    """Move the correction biases towards an equal load, in place: `bias += rate * sign(mean - load)`.

    Args:
        routers: routers of this rank's layers, with their numbers.
        load: tokens of each expert on all ranks, `[L, E]` int64, equal on all ranks.
        rate: change of a bias.
    """
    # In integers, so that an expert with exactly the mean load does not move because of rounding.
    direction = torch.sign(load.sum(-1, keepdim=True) - load * load.shape[1])
    for number, router in routers:
        bias = bias_of(router)
        if bias is not None:
            bias.add_(rate * direction[number].to(bias.device, bias.dtype))
