"""Planted bugs, one at a time; the quality of the simulation is how soon it finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.sim.history import Failure, live
from tests.sim.planted.core import CORE
from tests.sim.planted.cost import COST
from tests.sim.planted.elastic import ELASTIC
from tests.sim.planted.engines import ENGINES
from tests.sim.planted.plant import Plant
from tests.sim.planted.queued import QUEUED
from tests.sim.planted.wider import WIDER

WITHIN = 1000
"""Largest number of histories."""
PLANTED: tuple[Plant, ...] = (*CORE, *WIDER, *COST)
__all__ = ["ELASTIC", "ENGINES", "PLANTED", "QUEUED", "WITHIN", "hunt", "planted"]


@contextlib.contextmanager
def planted(bug: Plant) -> Iterator[None]:
    """Run the operator with a bug."""
    with contextlib.ExitStack() as stack:
        bug(stack)
        yield


def hunt(
    bug: Plant,
    seed: int,
    histories: int = WITHIN,
    *,
    queued: bool = False,
    elastic: bool = False,
    engines: bool = False,
) -> tuple[int, Failure] | None:
    """Return the number of histories that find a bug and the failed one, or None after `histories`.

    Args:
        bug: planted bug.
        seed: seed of the first history.
        histories: largest number of histories.
        queued: whether the operator has a queue.
        elastic: whether the trainer is elastic.
        engines: whether the history varies the number of engines.
    """
    with planted(bug):
        for count in range(1, histories + 1):
            failure = live(seed + count - 1, shrink=False, queued=queued, elastic=elastic, engines=engines)
            if failure is not None:
                return count, failure
    return None
