"""Layouts of trainer and engines: AReaL's grammar, and the rules between a layout and a model's sizes.

`vllm:d4t2+fsdp:d8` means 4 engines with 2 GPUs each and a trainer with 8 GPUs. A part is an optional backend and degrees: d copies, t
tensor, p pipeline, c context, e expert. `+` separates parts with their own GPUs, `|` parts that use the same GPUs in turn. Megatron may
divide attention and experts differently: `megatron:(attn:d4t2|ffn:d2t2e2)`.

The trainer and `rlrun fit` share the rules. Every returned text continues after the field's value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ENGINES = ("sglang", "vllm")
TRAINERS = ("fsdp", "megatron", "archon")
FORM = "vllm:d4t2+fsdp:d8"
_PART = re.compile(r"(?:([a-z]+)(?:\[\w+\])?[:.])?((?:[a-z]\d+)+|eval|cpu|\((?:attn|ffn):[^()]*\))")
_DEGREE = re.compile(r"([a-z])(\d+)")


@dataclass(frozen=True)
class Part:
    """Engines, or a trainer."""

    backend: str
    """Name of the backend; empty: not given."""
    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the whole part. Experts are divided among the same GPUs."""
        return self.d * self.t * self.p * self.c


@dataclass(frozen=True)
class Allocation:
    """Engines and trainer of one run."""

    engines: Part | None
    trainer: Part | None
    colocated: bool
    """Whether both use the same GPUs, in turn."""


def parse_allocation(text: str) -> Allocation:
    """Parse an allocation.

    Raises:
        ValueError: A part is invalid; the message has the part and the expected form.
    """
    bare = re.sub(r"\s", "", text)
    parts, colocated = [], False
    for index, piece in enumerate(re.split(r"([+|])(?![^()]*\))", bare)):
        if index % 2:
            colocated = colocated or piece == "|"
        elif (part := _parse_part(piece, text)) is not None:
            parts.append(part)
    engines = [part for part in parts if part.backend in ENGINES]
    trainers = [part for part in parts if part.backend not in ENGINES]
    if len(engines) > 1 or len(trainers) > 1:
        raise ValueError(
            f"{text!r} has {len(engines)} parts for engines and {len(trainers)} for trainers, expected one of each: {FORM}"
        )
    return Allocation(engines[0] if engines else None, trainers[0] if trainers else None, colocated)


def _parse_part(piece: str, text: str) -> Part | None:
    match = _PART.fullmatch(piece)
    if match is None:
        raise ValueError(f"{piece!r} in {text!r} is not a part of an allocation; write {FORM}")
    backend, dims = match[1] or "", match[2]
    if backend and backend not in (*ENGINES, *TRAINERS):
        raise ValueError(f"{backend!r} in {text!r} is not a known backend; known: {', '.join((*ENGINES, *TRAINERS))}")
    if dims in ("eval", "cpu"):
        return None
    if not dims.startswith("("):
        return Part(backend, **_parse_degrees(dims, text))
    halves = dict(half.split(":", 1) for half in dims[1:-1].split("|"))
    degrees = _parse_degrees(halves.get("attn", ""), text)
    return Part(backend, **(degrees | {"e": _parse_degrees(halves.get("ffn", ""), text).get("e", 1)}))


def _parse_degrees(dims: str, text: str) -> dict[str, int]:
    degrees: dict[str, int] = {}
    for letter, number in _DEGREE.findall(dims):
        if letter not in "dtpce" or letter in degrees or int(number) < 1:
            raise ValueError(
                f"{letter}{number} in {text!r} is invalid: degrees are d, t, p, c and e, each at most once and at least 1; write {FORM}"
            )
        degrees[letter] = int(number)
    return degrees


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
