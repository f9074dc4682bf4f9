"""Fixed histories of an elastic trainer, and planted bugs of its size that they find."""

from __future__ import annotations

import pytest

from tests.sim.history import live
from tests.sim.planted import ELASTIC, hunt
from tests.sim.planted.plant import Plant

HISTORIES, GATE_HISTORIES = 16, 8
WITHIN = 40
FOUND_AT: dict[str, int] = {
    "a_smaller_group_waits_for_all_of_its_ranks": 0,
    "a_growth_that_found_no_node_is_tried_again_at_once": 0,
    "nodes_are_not_waited_for": 0,
    "it_never_grows": 0,
    "it_grows_wherever_it_is": 9,
    "the_fewest_pods_are_forgotten": 6,
}
"""Seeds that find a bug immediately; after changes of the actions, the search starts from the first seed."""


@pytest.mark.parametrize(
    "seed",
    [
        *range(GATE_HISTORIES),
        *(pytest.param(seed, marks=pytest.mark.full) for seed in range(GATE_HISTORIES, HISTORIES)),
    ],
)
def test_elastic_trainer_keeps_its_invariants(seed: int) -> None:
    failure = live(seed, elastic=True)
    assert failure is None, str(failure)


def test_every_planted_bug_has_a_seed() -> None:
    assert FOUND_AT.keys() == {bug.__name__ for bug in ELASTIC}


@pytest.mark.full
@pytest.mark.parametrize("bug", ELASTIC, ids=lambda bug: bug.__name__)
def test_planted_elastic_bug_is_found(bug: Plant) -> None:
    found = hunt(bug, FOUND_AT[bug.__name__], 1, elastic=True) or hunt(bug, 0, WITHIN, elastic=True)
    assert found is not None
    assert not found[1].problem.startswith("the simulation itself")
