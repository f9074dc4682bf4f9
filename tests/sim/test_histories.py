"""2,000 fixed random histories in blocks, and 400 with a queue; the gate runs 150 of them.

`python -m tests.sim` runs other and more histories.
"""

from __future__ import annotations

import pytest

from tests.sim.history import generate, live, problem_of, smallest

BLOCKS, BLOCK = 40, 50
QUEUED_BLOCKS = 8
GATE_BLOCKS, GATE_QUEUED_BLOCKS = 2, 1


def blocks(count: int, in_gate: int) -> list[object]:
    """Return the numbers of blocks; those after the first `in_gate` belong to the full set."""
    return [block if block < in_gate else pytest.param(block, marks=pytest.mark.full) for block in range(count)]


@pytest.mark.parametrize("block", blocks(BLOCKS, GATE_BLOCKS))
def test_random_histories_keep_their_invariants(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        failure = live(seed)
        assert failure is None, str(failure)


@pytest.mark.parametrize("block", blocks(QUEUED_BLOCKS, GATE_QUEUED_BLOCKS))
def test_queued_histories_keep_their_invariants(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        failure = live(seed, queued=True)
        assert failure is None, str(failure)


def test_history_is_determined_by_its_seed() -> None:
    assert generate(7) == generate(7) != generate(8)


def test_failing_history_is_minimized() -> None:
    steps = generate(3)
    needed = [steps[5], steps[11]]
    assert smallest(steps, lambda some: all(step in some for step in needed)) == needed


def test_simulation_error_is_reported_as_failure() -> None:
    problem = problem_of([("no such action", 0, 0)], seed=1)
    assert problem is not None
    assert problem.startswith("the simulation itself: KeyError")
