"""Garbage collection between steps: full collections, and surviving objects are frozen once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rlrun.trainer.garbage import AGAIN, Garbage


class Node:
    """Object that can be part of a cycle and counts living instances."""

    alive = 0

    def __init__(self) -> None:
        self.own = self
        Node.alive += 1

    def __del__(self) -> None:
        Node.alive -= 1


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def test_garbage_collection_runs_at_doubling_steps() -> None:
    garbage = Garbage()
    assert [step for step in range(1, 200) if garbage.after_step()] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_garbage_collection_frees_cycles_and_freezes_survivors() -> None:
    Node()
    kept = Node()
    before = gc.get_freeze_count()
    Garbage().after_step()
    assert Node.alive == 1, "the cycle that nothing names is collected, the other one is not"
    assert gc.get_freeze_count() > before
    assert not any(found is kept for found in gc.get_objects())


def test_frozen_objects_are_collected_after_a_run() -> None:
    """A sharded model is a cycle: otherwise, a guest's reference model would stay in GPU memory permanently."""
    garbage, kept = Garbage(), [Node()]
    garbage.after_step()
    kept.clear()
    gc.collect()
    assert Node.alive == 1
    garbage.after_run()
    assert Node.alive == 0


def test_frozen_objects_are_collected_during_a_long_run() -> None:
    garbage, kept = Garbage(), [Node()]
    garbage.after_step()
    kept.clear()
    for _ in range(AGAIN - 2):
        garbage.after_step()
    assert Node.alive == 1
    garbage.after_step()
    assert Node.alive == 0
