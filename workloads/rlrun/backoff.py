"""Backoff: seconds between tries that grow up to a bound, spread by chance where many would try together."""

from __future__ import annotations

MAX_DOUBLINGS = 40
"""Beyond, every product is over any bound; and a power of two of a few thousand is no float any more."""


def backoff(failures: int, *, first: float, longest: float) -> float:
    """Seconds to wait after so many failures in a row: `first`, doubled after each further one, `longest` at most."""
    return min(first * 2.0 ** min(max(0, failures - 1), MAX_DOUBLINGS), longest)


def jittered(seconds: float, share: float, random: float) -> float:
    """`seconds`, by up to `share` of it longer or shorter.

    Args:
        seconds: to spread.
        share: in [0, 1).
        random: in [0, 1).
    """
    return seconds * (1 - share + 2 * share * random)
