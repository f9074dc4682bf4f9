"""Collections of garbage: between the steps that they are for, of all generations, and set aside once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rlrun.trainer.garbage import AGAIN, Garbage


class Node:
    """An object that can be part of a cycle and is seen by weak counting."""

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


def test_it_collects_after_steps_that_double() -> None:
    garbage = Garbage()
    assert [step for step in range(1, 200) if garbage.after_step()] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_cycles_are_gone_and_what_is_alive_is_not_looked_through_again() -> None:
    Node()
    kept = Node()
    before = gc.get_freeze_count()
    Garbage().after_step()
    assert Node.alive == 1, "the cycle that nothing names is collected, the other one is not"
    assert gc.get_freeze_count() > before
    assert not any(found is kept for found in gc.get_objects())


def test_what_was_set_aside_and_died_is_collected_when_a_run_has_gone() -> None:
    """A sharded model is a cycle: a guest's reference would stay in the memory of the GPU for ever."""
    garbage, kept = Garbage(), [Node()]
    garbage.after_step()
    kept.clear()
    gc.collect()
    assert Node.alive == 1
    garbage.after_run()
    assert Node.alive == 0


def test_what_was_set_aside_and_died_is_collected_in_a_long_run() -> None:
    garbage, kept = Garbage(), [Node()]
    garbage.after_step()
    kept.clear()
    for _ in range(AGAIN - 2):
        garbage.after_step()
    assert Node.alive == 1
    garbage.after_step()
    assert Node.alive == 0
