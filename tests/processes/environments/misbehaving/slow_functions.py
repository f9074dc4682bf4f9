"""Functions for calls in another process."""

from __future__ import annotations

import os
import time


def add(a: int, b: int) -> int:
    print("noise")
    return a + b


def compute_for_ever() -> None:
    while True:
        sum(range(1000))


def die() -> None:
    os._exit(3)


def fail() -> None:
    raise ValueError("no such row")


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def prepare_slowly() -> None:
    """Prepare for longer than any call in a test may take."""
    time.sleep(2.5)
    PREPARED.append(os.getpid())


def is_prepared() -> bool:
    return [os.getpid()] == PREPARED


PREPARED: list[int] = []
