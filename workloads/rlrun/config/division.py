"""Rules between a layout and a model's sizes: trainer and `rlrun fit` refuse by the same. Every text follows the field's value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

CRITIC_PROBLEM = "does not go with algorithm.critic, whose values are computed by a whole model; set pp: 1"
"""Follows `parallelism.pp` where a run with stages has a critic."""


def tensor_problem(tp: int, sizes: Iterable[tuple[str, int]]) -> str | None:
    """Reason why `tp` ranks cannot share a layer's matrices; None where they can.

    Args:
        tp: `parallelism.tp`.
        sizes: what is divided, in words, and how many there are.
    """
    for what, count in sizes:
        if count % tp:
            return f"must divide the model's {what} ({count}); lower tp"
    return None


def experts_problem(ep: int, tp: int, experts: int) -> tuple[Literal["ep", "tp"], str] | None:
    """Field and reason why experts cannot be dealt out over `ep * tp` ranks; None where they can.

    Args:
        ep: `parallelism.ep`.
        tp: `parallelism.tp`, whose ranks get experts of their own too.
        experts: of a layer; 0: dense.
    """
    if ep > 1 and not experts:
        return "ep", "is for models with experts, and the model has no experts; set ep: 1"
    if experts % (ep * tp) == 0:
        return None
    must = f"must divide the model's experts ({experts}); lower ep or tp"
    return ("ep", f"times tp ({tp}) {must}") if ep > 1 else ("tp", f"times ep (1) {must}")


def stages_problem(pp: int, layers: int, *, per_rank: int = 1) -> str | None:
    """Reason why a model of so many layers has no `pp * per_rank` stages; None where it has."""
    if pp * per_rank <= layers:
        return None
    if per_rank == 1:
        return f"is more than the model's layers ({layers}); lower pp"
    return f"times stagesPerRank ({per_rank}) is more than the model's layers ({layers}); lower pp or stagesPerRank"


def stages_of_rank(place: int, ranks: int, per_rank: int, *, folded: bool) -> tuple[int, ...]:
    """Numbers of the stages of one rank of a pipeline, ascending.

    Args:
        place: of the rank among those that a row passes through.
        ranks: `parallelism.pp`.
        per_rank: `parallelism.stagesPerRank`.
        folded: whether rows go through the ranks and back; else they go around.
    """
    if folded:
        return (place, 2 * ranks - 1 - place)
    return tuple(place + ranks * turn for turn in range(per_rank))


def later_weights_problem(schedule: str, *, tp: int, adapters: bool, compiled: bool, accumulation: str) -> str | None:
    """Reason why gradients of weights cannot be computed later than those of inputs; None where they can.

    Args:
        schedule: `parallelism.schedule`, one of the zero-bubble ones.
        tp: `parallelism.tp`.
        adapters: whether adapters are trained.
        compiled: `trainer.compile` is true.
        accumulation: `trainer.gradientAccumulation`.
    """
    if tp == 1 and accumulation == "local" and not (adapters or compiled):
        return None
    return (
        f"parallelism.schedule ({schedule}) computes gradients of weights after those of inputs, which needs tp: 1 (here {tp}), "
        f"gradientAccumulation: local (here {accumulation}), no compile: true and no lora; change these, or set "
        "schedule: Interleaved1F1B"
    )


def compile_problem(tp: int, *, later_weights: bool = False) -> str | None:
    """Reason why layers are not compiled, after `trainer.compile`'s value; None where they are.

    torch 2.13 recurses without end in the gradient of a linear layer of DTensors when the row's length is a symbol.

    Args:
        tp: ranks that share every layer.
        later_weights: whether a pipeline computes gradients of weights later than those of inputs.
    """
    if later_weights:
        return "joins both gradients of a layer, which a zero-bubble parallelism.schedule divides; set compile: false"
    if tp == 1:
        return None
    return (
        f"does not go with trainer.parallelism.tp ({tp}): torch compiles no layer that ranks share for rows of all lengths; "
        "set compile: false or tp: 1"
    )
