"""Layout of a model over ranks: pipeline stages, and rules between a layout and the models' sizes.

The first part divides the layers into stages of nearly equal work and computes the part and the idle time of each rank. Pure. The rules are
checked before the start, because the roles would only fail minutes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from rlrun.api.resource import RLRunSpec
from rlrun.config.families import Kind, explain_stages, explain_undivided
from rlrun.config.layout_rules import (
    CRITIC_PROBLEM,
    compile_problem,
    experts_problem,
    stages_of_rank,
    stages_problem,
    tensor_problem,
)
from rlrun.config.models.parallel import ZERO_BUBBLE, ParallelismConfig
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.fit.architecture import Architecture
from rlrun.fit.gpu_kernels import kernel_problem


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
        """Total number of its parameters, without encoders, which the first rank has."""
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
    each = (model.decoder_parameters - model.root_parameters) / model.layers
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


Key = tuple[str | int, ...]
"""Path of a field of the specification, in Python names."""
_REFERENCE = "which also divides algorithm.reference,"


def layout_problems(
    spec: RLRunSpec, model: Architecture, reference: Architecture | None, *, product: str | None = None
) -> Iterator[tuple[Key, str]]:
    """Yield fields that do not fit the models, each with the value and the fix.

    Args:
        spec: specification of the run.
        model: shape of the policy.
        reference: shape of the frozen model, if it is known.
        product: product name of the trainer's GPUs, if it is known.
    """
    own = spec.trainer.shared_with is None
    if spec.task in TRAINING_TASKS and own:
        yield from _check_trainer(spec, model)
        if (fault := kernel_problem(spec.trainer, model, product)) is not None:
            yield ("trainer", "attention"), fault
        if reference is not None:
            yield from _check_reference(spec, model, reference)
    if spec.task != "SFT" and own:
        yield from _check_engine(spec, model)


def _check_trainer(spec: RLRunSpec, model: Architecture) -> Iterator[tuple[Key, str]]:
    layout = spec.trainer.parallelism
    for field, text in _find_indivisible(layout, model):
        yield ("trainer", "parallelism", field), f"{getattr(layout, field)} {text}"
    if layout.pp > 1 and spec.algorithm.critic is not None:
        yield ("trainer", "parallelism", "pp"), f"{layout.pp} {CRITIC_PROBLEM}"
    if (
        spec.trainer.compile
        and (fault := compile_problem(layout.tp, later_weights=spec.trainer.later_weights)) is not None
    ):
        yield ("trainer", "compile"), f"true {fault}"


def _find_indivisible(layout: ParallelismConfig, model: Architecture) -> Iterator[tuple[str, str]]:
    """Yield fields of the layout by which a model cannot be divided, each with text that continues after the value."""
    divided: dict[Kind, int] = {"tp": layout.tp, "cp": layout.cp}
    if model.experts:
        divided["ep"] = layout.ep
    for name, size in divided.items():
        if (fault := explain_undivided(model.trained_type, name, size)) is not None:
            yield name, fault
    cut = stages_problem(layout.pp, model.layers, per_rank=layout.local_stages)
    if (fault := explain_stages(model.trained_type, layout.pp) or cut) is not None:
        yield "pp", fault
    if (fault := tensor_problem(layout.tp, model.divided)) is not None:
        yield "tp", fault
    if (dealt := experts_problem(layout.ep, layout.tp, model.experts)) is not None:
        yield dealt


def _check_reference(spec: RLRunSpec, model: Architecture, reference: Architecture) -> Iterator[tuple[Key, str]]:
    """Check the frozen model, which the trainer divides like the policy."""
    layout = spec.trainer.parallelism
    if reference.vocabulary != model.vocabulary:
        yield (
            ("algorithm", "reference", "model"),
            f"has a vocabulary of {reference.vocabulary:,} tokens, but the policy's has {model.vocabulary:,}; "
            "use a model of the same family",
        )
    known = set(_find_indivisible(layout, model))
    for field, text in _find_indivisible(layout, reference):
        if (field, text) not in known:
            yield ("trainer", "parallelism", field), f"{getattr(layout, field)}, {_REFERENCE} {text}"


def _check_engine(spec: RLRunSpec, model: Architecture) -> Iterator[tuple[Key, str]]:
    tp, given = spec.inference.tensor_parallel, spec.inference.max_model_len
    if model.heads % tp:
        yield (
            ("inference", "tensor_parallel"),
            f"{tp} must divide the model's attention heads ({model.heads}); lower it",
        )
    longest = given or spec.seq_len
    if model.positions is not None and longest > model.positions:
        key: Key = ("seq_len",) if given is None or spec.seq_len > model.positions else ("inference", "max_model_len")
        yield (
            key,
            f"{longest:,} is higher than the model's positions (max_position_embeddings: {model.positions:,}); lower it",
        )
