"""Rules between a layout and a model's sizes, shared by the trainer and `rlrun fit`. Every text continues after the field's value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

CRITIC_PROBLEM = "does not work with algorithm.critic, whose values need the whole model on one rank; set pp: 1"
"""Text after `parallelism.pp` for a run with stages and a critic."""


def tensor_problem(tp: int, sizes: Iterable[tuple[str, int]]) -> str | None:
    """Return why `tp` ranks cannot share a layer's matrices, or None if they can.

    Args:
        tp: tensor parallelism (`parallelism.tp`).
        sizes: name and number of each divided unit.
    """
    for what, count in sizes:
        if count % tp:
            return f"must divide the model's {what} ({count}); lower tp"
    return None


def experts_problem(ep: int, tp: int, experts: int) -> tuple[Literal["ep", "tp"], str] | None:
    """Return field and reason if experts cannot be divided among `ep * tp` ranks, or None if they can.

    Args:
        ep: expert parallelism (`parallelism.ep`).
        tp: tensor parallelism (`parallelism.tp`), whose ranks get their own experts too.
        experts: number of experts per layer; 0: dense model.
    """
    if ep > 1 and not experts:
        return "ep", "needs a model with experts, but the model has no experts; set ep: 1"
    if experts % (ep * tp) == 0:
        return None
    must = f"must divide the model's experts ({experts}); lower ep or tp"
    return ("ep", f"times tp ({tp}) {must}") if ep > 1 else ("tp", f"times ep (1) {must}")


def stages_problem(pp: int, layers: int, *, per_rank: int = 1) -> str | None:
    """Return why a model with this number of layers cannot have `pp * per_rank` stages, or None if it can."""
    if pp * per_rank <= layers:
        return None
    if per_rank == 1:
        return f"is higher than the number of the model's layers ({layers}); lower pp"
    return f"times stagesPerRank ({per_rank}) is higher than the number of the model's layers ({layers}); lower pp or stagesPerRank"


def stages_of_rank(place: int, ranks: int, per_rank: int, *, folded: bool) -> tuple[int, ...]:
    """Return the numbers of the stages of one pipeline rank, in ascending order.

    Args:
        place: position of the rank among the ranks that a micro-batch passes through, from 0.
        ranks: number of ranks in the pipeline (`parallelism.pp`).
        per_rank: stages per rank (`parallelism.stagesPerRank`).
        folded: whether micro-batches pass through the ranks and back; otherwise they pass around the ranks.
    """
    if folded:
        return (place, 2 * ranks - 1 - place)
    return tuple(place + ranks * turn for turn in range(per_rank))


def later_weights_problem(schedule: str, *, tp: int, adapters: bool, compiled: bool, accumulation: str) -> str | None:
    """Return why gradients of weights cannot be computed later than gradients of inputs, or None if they can.

    Args:
        schedule: zero-bubble schedule (`parallelism.schedule`).
        tp: tensor parallelism (`parallelism.tp`).
        adapters: whether adapters are trained.
        compiled: whether `trainer.compile` is true.
        accumulation: value of `trainer.gradientAccumulation`.
    """
    if tp == 1 and accumulation == "local" and not (adapters or compiled):
        return None
    return (
        f"parallelism.schedule ({schedule}) computes gradients of weights after gradients of inputs, which needs tp: 1 (here {tp}), "
        f"gradientAccumulation: local (here {accumulation}), no compile: true and no lora; change these, or set "
        "schedule: Interleaved1F1B"
    )


def compile_problem(tp: int, *, later_weights: bool = False) -> str | None:
    """Return why layers are not compiled, as text after the value of `trainer.compile`, or None if they are.

    torch 2.13 recurses infinitely in the gradient of a linear layer of DTensors if the length of the row is a symbol.

    Args:
        tp: number of ranks that share every layer.
        later_weights: whether a pipeline computes gradients of weights later than gradients of inputs.
    """
    if later_weights:
        return "compiles both gradients of a layer together, but the zero-bubble parallelism.schedule separates them; set compile: false"
    if tp == 1:
        return None
    return (
        f"does not work with trainer.parallelism.tp ({tp}), because torch cannot compile layers that ranks share for rows of all lengths; "
        "set compile: false or tp: 1"
    )
