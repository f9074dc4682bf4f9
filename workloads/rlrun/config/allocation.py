"""AReaL's allocation grammar: `vllm:d4t2+fsdp:d8` means 4 engines with 2 GPUs each and a trainer with 8 GPUs.

A part is an optional backend and degrees: d copies, t tensor, p pipeline, c context, e expert. `+` separates parts with their own GPUs,
`|` parts that use the same GPUs in turn. Megatron may divide attention and experts differently: `megatron:(attn:d4t2|ffn:d2t2e2)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
