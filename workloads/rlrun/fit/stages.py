"""Division of a model's layers into pipeline stages of nearly equal work, the part of each rank, and its idle time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from rlrun.config.division import stages_of_rank
from rlrun.config.models.parallel import ZERO_BUBBLE, ParallelismConfig
from rlrun.fit.architecture import Architecture


def cut_layers(layers: Sequence[float], head: float, stages: int) -> list[range]:
    """Divide layers into stages of consecutive layers, so that the most expensive stage is as cheap as possible.

    Among equal divisions the function prefers cheap first stages, because these keep activations of the most micro-batches.

    Args:
        layers: cost of each layer, in any unit.
        head: additional cost of the last stage.
        stages: number of stages, at most the number of layers.

    Raises:
        ValueError: There are more stages than layers.
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be divided into {stages} stages")
    sums = [0.0, *accumulate(layers)]

    # Dynamic programming over the first layer and the number of stages. Tuples compare by cost first, then by early ends.
    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest cost among the stages from layer `start` on, and the end of each stage."""
        if left == 1:
            return sums[count] - sums[start] + head, (count,)
        found = []
        for end in range(start + 1, count - left + 2):
            rest, ends = best(end, left - 1)
            found.append((max(sums[end] - sums[start], rest), (end, *ends)))
        return min(found)

    ends = best(0, stages)[1]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


@dataclass(frozen=True)
class Held:
    """Part of a model on one pipeline rank; without a pipeline, the whole model."""

    layout: ParallelismConfig
    index: int
    """Position of the rank among the ranks that a micro-batch passes through."""
    count: int
    """Number of these ranks."""
    numbers: tuple[int, ...]
    """Numbers of its stages."""
    layers: int
    """Number of its layers."""
    each: float
    """Parameters per layer."""
    root: int
    """Parameters of its embedding, last norm and head."""

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return 0 in self.numbers

    @property
    def last(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.count * len(self.numbers) - 1 in self.numbers

    @property
    def parameters(self) -> int:
        """Total number of its parameters."""
        return self.root + round(self.layers * self.each)

    @property
    def rows(self) -> float:
        """Micro-batches whose activations it keeps at once, for a step with at least twice as many micro-batches as ranks."""
        return kept_passes(self.layout, self.index) / len(self.numbers)

    @property
    def links(self) -> int:
        """Tensors that it receives per micro-batch: from the stage before and the stage after each of its stages."""
        return 2 * len(self.numbers) - self.first - self.last


def kept_passes(layout: ParallelismConfig, place: int) -> int:
    """Return the passes through one stage whose activations a rank keeps at once: forward passes without their backward pass.

    For a step with at least `2 * pp` micro-batches. With zero-bubble schedules a pass ends with the gradients of its weights.

    Args:
        layout: layout with its schedule.
        place: position of the rank among the ranks that a micro-batch passes through.
    """
    behind = layout.pp - 1 - place
    if layout.schedule == "1F1B":
        return behind + 1
    if layout.schedule in ZERO_BUBBLE:
        return layout.pp * layout.local_stages
    return layout.pp * (layout.local_stages - 1) + 2 * behind + 1


def idle_share(layout: ParallelismConfig, rows: int) -> float:
    """Return the share of a step that a pipeline rank is idle.

    All stages count as equal. A forward pass, the gradients of its inputs and the gradients of its weights take one unit each, and
    transfers take no time. Exact if `rows` is a multiple of pp, and at least twice pp with ZBVZeroBubble.

    Args:
        layout: layout with its schedule.
        rows: micro-batches of a step, per data-parallel rank.
    """
    waits = layout.pp - 1
    return waits / (waits + idle_divisor(layout) * rows)


def idle_divisor(layout: ParallelismConfig) -> int:
    """Return the units of work per micro-batch. In a step, a pipeline rank is idle for `pp - 1` such units."""
    return layout.local_stages * (3 if layout.schedule in ZERO_BUBBLE else 1)


def stages_of(model: Architecture, layout: ParallelismConfig) -> list[Held]:
    """Return the part of each rank that a micro-batch passes through, in order. Ranks without layers are omitted.

    Args:
        model: shape of the model.
        layout: layout with `pp` and its schedule.
    """
    count = min(layout.pp, model.layers)
    per_rank = layout.local_stages if count * layout.local_stages <= model.layers else 1
    visited = model.experts_per_token / model.experts if model.experts else 0.0
    cost = model.layer_parameters + visited * model.expert_parameters
    each = (model.parameters - model.root_parameters) / model.layers
    if count == 1:
        return [Held(layout, 0, 1, (0,), model.layers, each, model.root_parameters)]
    roots = [model.table] + [0] * (count * per_rank - 2) + [model.table + model.hidden]
    runs = cut_layers([cost] * model.layers, model.table, count * per_rank)
    found = []
    for place in range(count):
        own = stages_of_rank(place, count, per_rank, folded=layout.folded and per_rank > 1)
        root = sum(roots[number] for number in own)
        if model.tied and {0, len(runs) - 1} <= {*own}:
            root -= model.table
        found.append(Held(layout, place, count, own, sum(len(runs[number]) for number in own), each, root))
    return found
