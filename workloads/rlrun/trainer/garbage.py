"""Python's cyclic garbage collector, kept out of the steps.

A collection of the oldest generation looks through everything that the process has ever made: after imports and compiled layers that is
half a second, at a moment of its own choosing, for which a GPU waits, and with it all other ranks. Here it happens between steps, on all
ranks after the same ones, and what is alive then is set aside and not looked through again.
"""

from __future__ import annotations

import gc

AGAIN = 64
"""Step from which on a collection looks through what was set aside, too."""


class Garbage:
    """Collections after steps 1, 2, 4, 8 and so on: later steps make little that stays.

    What is set aside may die: a guest leaves with its reference model, whose parts refer to each other, and so to the memory of the GPU.
    So all is looked through again when a run has gone, and at the steps above `AGAIN`.
    """

    def __init__(self) -> None:
        self._steps = 0

    def after_step(self) -> bool:
        """Count a step; collect if it is one of those. Returns whether it was."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return False
        if self._steps >= AGAIN:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        return True

    def after_run(self) -> None:
        """A run has gone: collect all that it had."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
