"""Cut of a model's layers into stages of nearly equal work, and what each stage has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from rlrun.fit.architecture import Architecture


def cut(layers: Sequence[float], head: float, stages: int) -> list[range]:
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
    """Part of a model that the ranks of a stage have; without a pipeline all of it."""

    index: int
    count: int
    run: range
    """Its layers."""
    each: float
    """Parameters of a layer."""
    root: int
    """Parameters of embedding, last norm and head that it has."""

    @property
    def first(self) -> bool:
        """True if it has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """True if it has norm and head."""
        return self.index == self.count - 1

    @property
    def layers(self) -> int:
        """Number of its layers."""
        return len(self.run)

    @property
    def parameters(self) -> int:
        """All of its parameters."""
        return self.root + round(self.layers * self.each)

    @property
    def rows(self) -> int:
        """Micro-batches whose activations it keeps at a time: those that went on and have not come back."""
        return self.count - self.index

    @property
    def links(self) -> int:
        """Tensors that it receives of every micro-batch: of the stage before it, and of the one behind."""
        return (not self.first) + (not self.last)


def stages_of(model: Architecture, count: int) -> list[Held]:
    """Stages of a model, in order; more than it has layers are as many as these.

    Args:
        model: its shape.
        count: `trainer.parallelism.pp`.
    """
    count = min(count, model.layers)
    visited = model.experts_per_token / model.experts if model.experts else 0.0
    cost = model.layer_parameters + visited * model.expert_parameters
    each = (model.parameters - model.root_parameters) / model.layers
    if count == 1:
        return [Held(0, 1, range(model.layers), each, model.root_parameters)]
    roots = [model.table] + [0] * (count - 2) + [model.table + model.hidden]
    runs = cut([cost] * model.layers, model.table, count)
    return [Held(index, count, run, each, root) for index, (run, root) in enumerate(zip(runs, roots, strict=True))]
