"""Hostile inputs: seeds with random changes of their bytes and structure."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

COUNT = int(os.environ.get("RLRUN_FUZZ", "2000"))
"""Inputs of each kind; the long run sets 100,000."""
_SCALARS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**400,
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "\x00",
        "\ud800",
        "\u202e\x1b[2J",
        "../../etc/passwd",
        "/dev/zero",
        "9" * 5000,
        "NaN",
        "null",
        "💥" * 50,
    ),
    *([], {}, [[]], {"": None}, [None] * 100, {"op": "ready"}, [{"a": [1]}]),
)
_KEYS = ("", "op", "__class__", "$patch", "a" * 300, "\ud800", "format_version", "rollout")


def documents(seeds: list[Any], seed: int = 0, count: int = COUNT) -> Iterator[Any]:
    """Yield JSON values: the seeds with replaced, removed, added, repeated and nested parts."""
    rng = random.Random(seed)
    for _ in range(count):
        document = copy.deepcopy(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            document = _changed(document, rng)
        yield document


def texts(seeds: list[bytes], seed: int = 0, count: int = COUNT) -> Iterator[bytes]:
    """Yield bytes: the seeds with changed, cut, doubled or swapped bytes, or random bytes."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                for _ in range(rng.choice((1, 1, 2, 16))):
                    if data:
                        data[rng.randrange(len(data))] = rng.randrange(256)
            case 4:
                del data[rng.randrange(len(data) + 1) :]
            case 5:
                at, length = rng.randrange(len(data) + 1), rng.randrange(64)
                data[at:at] = data[at : at + length] or rng.randbytes(length)
            case 6:
                at, length = rng.randrange(len(data) + 1), rng.choice((1, 4, 8, 200))
                del data[at : at + length]
            case 7:
                data = bytearray(rng.randbytes(rng.randrange(300)))
        yield bytes(data)


def as_json(document: Any) -> bytes:
    """Encode a document as a hostile client would: not every value is JSON, nor every text UTF-8."""
    return json.dumps(document).encode()


def deep(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    """Return a document with this number of levels."""
    return (opening * levels + closing * levels).encode()


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(_SCALARS))
            case 2:
                value[key] = [value[key]]
            case _:
                value[key] = _changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                del value[index]
            case 1:
                value.insert(index, copy.deepcopy(rng.choice(_SCALARS)))
            case 2:
                value *= 2
            case _:
                value[index] = _changed(value[index], rng)
        return value
    return copy.deepcopy(rng.choice(_SCALARS))
