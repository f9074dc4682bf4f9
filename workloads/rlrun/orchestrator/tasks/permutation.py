"""Stateless order: turns by weights, and a permutation of any length, computed for one position at a time. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

_ROUNDS = 4


def share_out(number: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return the owner of turn `number`, and the number of its earlier turns.

    The weights form a binary tree. At each fork the left side has got `floor(number·share)` of the first `number`
    turns, so that both results depend only on `number`.
    """
    low, high = 0, len(weights)
    while high - low > 1:
        middle = (low + high) // 2
        left = sum(weights[low:middle], Fraction(0))
        share = left / (left + sum(weights[middle:high], Fraction(0)))
        before, after = int(number * share), int((number + 1) * share)
        if after > before:
            number, high = before, middle
        else:
            number, low = number - before, middle
    return low, number


def _mix_bits(key: bytes, value: int) -> int:
    digest = hashlib.blake2b(value.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def permute_position(position: int, size: int, key: str) -> int:
    """Return the image of `position` in a pseudo-random permutation of `range(size)`.

    The permutation is a Feistel network over the next even number of bits. Results outside of the range are permuted
    again ("cycle walking", Black & Rogaway 2002), fewer than four times on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [hashlib.blake2b(f"{key}/{i}".encode(), digest_size=16).digest() for i in range(_ROUNDS)]
    value = position
    while True:
        left, right = value >> half, value & mask
        for round_key in keys:
            left, right = right, left ^ (_mix_bits(round_key, right) & mask)
        value = (left << half) | right
        if value < size:
            return value
