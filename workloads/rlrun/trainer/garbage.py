"""Control of Python's cyclic garbage collector: collections run between steps only.

A collection of the oldest generation traverses every object of the process. After imports and compiled layers it takes half a second, at
an arbitrary moment, while this GPU and all other ranks wait. Here it runs between steps, after the same steps on all ranks; surviving
objects are frozen and not traversed again.
"""

from __future__ import annotations

import gc

AGAIN = 64
"""First step whose collection also traverses the frozen objects."""


class Garbage:
    """Collections after steps 1, 2, 4, 8 and so on, because later steps create few objects that survive.

    Frozen objects may become garbage: a guest that leaves has a reference model with reference cycles, which keep GPU memory. Therefore
    everything is traversed when a run leaves, and from step `AGAIN` on.
    """

    def __init__(self) -> None:
        self._steps = 0

    def after_step(self) -> bool:
        """Count a step, collect if it is due, and return whether it collected."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return False
        if self._steps >= AGAIN:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        return True

    def after_run(self) -> None:
        """Collect the objects of a run that has left."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
