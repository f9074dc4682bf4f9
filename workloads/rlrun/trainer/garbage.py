"""Python's cyclic garbage collector, kept out of the steps.

A collection of the oldest generation looks through everything that the process has ever made: after imports and compiled layers that is
half a second, at a moment of its own choosing, for which a GPU waits, and with it all other ranks. Here it happens between steps, on all
ranks after the same ones, and what is alive then is set aside and not looked through again.
"""

from __future__ import annotations

import gc


class Garbage:
    """Collections after steps 1, 2, 4, 8 and so on: later steps make little that stays, and what is set aside by mistake is little, too."""

    def __init__(self) -> None:
        self._steps = 0

    def after_step(self) -> bool:
        """Count a step; collect if it is one of those. Returns whether it was."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return False
        gc.collect()
        gc.freeze()
        return True
