"""Cut of a model's layers into stages of nearly equal work, what each rank of a pipeline has, and how long it waits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from rlrun.config.division import stages_of_rank
from rlrun.config.models.parallel import ZERO_BUBBLE, ParallelismConfig
from rlrun.fit.architecture import Architecture


def cut_layers(layers: Sequence[float], head: float, stages: int) -> list[range]:
    """The layers of each stage, in order: runs of neighbours, of which the most costly costs least.

    Of cuts that are equal in this the one with the least in the first stages is taken: these keep activations of most micro-batches.

    Args:
        layers: cost of each layer, in any unit.
        head: cost of what the last stage has besides.
        stages: at most as many as layers.

    Raises:
        ValueError: there are more stages than layers.
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(layers)]

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Largest cost of the stages from layer `start` on, and where each of them ends."""
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
    """Part of a model that one rank of a pipeline has; without a pipeline all of it."""

    layout: ParallelismConfig
    index: int
    """Place of the rank among those that a row passes through."""
    count: int
    """Number of these ranks."""
    numbers: tuple[int, ...]
    """Its stages."""
    layers: int
    """Number of its layers."""
    each: float
    """Parameters of a layer."""
    root: int
    """Parameters of embedding, last norm and head that it has."""

    @property
    def first(self) -> bool:
        """True if it has the embedding."""
        return 0 in self.numbers

    @property
    def last(self) -> bool:
        """True if it has norm and head."""
        return self.count * len(self.numbers) - 1 in self.numbers

    @property
    def parameters(self) -> int:
        """All of its parameters."""
        return self.root + round(self.layers * self.each)

    @property
    def rows(self) -> float:
        """Micro-batches whose activations it keeps at a time, of a step with twice as many as ranks or more."""
        return kept_passes(self.layout, self.index) / len(self.numbers)

    @property
    def links(self) -> int:
        """Tensors that it receives of every micro-batch: of the stage before each of its own, and of the one behind."""
        return 2 * len(self.numbers) - self.first - self.last


def kept_passes(layout: ParallelismConfig, place: int) -> int:
    """Passes of a row through one stage whose activations a rank keeps at a time: forward ones that have not come back.

    Of a step with `2 * pp` rows or more; with zero-bubble schedules a pass is over when the gradients of its weights are computed.

    Args:
        layout: with its schedule.
        place: of the rank among those that a row passes through.
    """
    behind = layout.pp - 1 - place
    if layout.schedule == "1F1B":
        return behind + 1
    if layout.schedule in ZERO_BUBBLE:
        return layout.pp * layout.local_stages
    return layout.pp * (layout.local_stages - 1) + 2 * behind + 1


def idle_share(layout: ParallelismConfig, rows: int) -> float:
    """Share of a step's passes for which a rank of a pipeline waits.

    Stages count as equal, and a forward pass, the gradients of its inputs and those of its weights as one unit each; what is sent takes no
    time. Exact where `rows` is a multiple of pp, and twice it or more with ZBVZeroBubble.

    Args:
        layout: with its schedule.
        rows: micro-batches of a step, of one data-parallel rank.
    """
    waits = layout.pp - 1
    return waits / (waits + idle_divisor(layout) * rows)


def idle_divisor(layout: ParallelismConfig) -> int:
    """Units of work in a row, of which a rank of a pipeline waits for `pp - 1` in a step."""
    return layout.local_stages * (3 if layout.schedule in ZERO_BUBBLE else 1)


def stages_of(model: Architecture, layout: ParallelismConfig) -> list[Held]:
    """Stages of each rank that a row passes through, in their order; of more stages than layers as many as these.

    Args:
        model: its shape.
        layout: with `pp`, and which stages a rank has.
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
