"""Backoff: seconds between retries that grow up to a bound, with jitter for clients that would retry together."""

from __future__ import annotations

MAX_DOUBLINGS = 40
"""Maximum number of doublings: beyond it, every product exceeds any bound, and much larger powers of two overflow a float."""


def backoff(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after consecutive failures: `first`, doubled after each further one, at most `longest`."""
    return min(first * 2.0 ** min(max(0, failures - 1), MAX_DOUBLINGS), longest)


def jittered(seconds: float, share: float, random: float) -> float:
    """Return `seconds`, changed at random by up to `share` of it.

    Args:
        seconds: base value.
        share: maximum relative change, in [0, 1).
        random: random number in [0, 1).
    """
    return seconds * (1 - share + 2 * share * random)
