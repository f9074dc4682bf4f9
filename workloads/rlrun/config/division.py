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


def stages_problem(pp: int, layers: int) -> str | None:
    """Reason why a model of so many layers has no `pp` stages; None where it has."""
    return f"is more than the model's layers ({layers}); lower pp" if pp > layers else None


def compile_problem(tp: int) -> str | None:
    """Reason why layers that `tp` ranks share are not compiled, after `trainer.compile`'s value; None where they are.

    torch 2.13 recurses without end in the gradient of a linear layer of DTensors when the row's length is a symbol.
    """
    if tp == 1:
        return None
    return (
        f"does not go with trainer.parallelism.tp ({tp}): torch compiles no layer that ranks share for rows of all lengths; "
        "set compile: false or tp: 1"
    )
