"""Garbage collection that does not hold up an event loop: what lives as long as the process, or a rollout, is visited once."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GROWTH_BYTES = 2 * 1024**3
"""More resident memory than after the last collection that visited everything, before the next one does."""
_FULL = 2
"""The generation of a full collection."""


def freeze_loaded() -> None:
    """Call once all is loaded: what is there now is garbage at once, or never.

    Packages and tasks are hundreds of thousands of objects, and every full collection would visit all of them: a fifth of the CPU of a
    rollout whose environment costs nothing. See `gc.freeze`.
    """
    gc.collect()
    gc.freeze()
    # The collector waits for a quarter of what was left by the last full collection before it begins the next: now nothing is left.
    gc.collect()


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector out of imports, and what these leave behind out of all later collections.

    What is imported stays. To look through it again and again takes a sixth of what the import of torch computes, a quarter of vLLM's.
    """
    enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:  # else all that is new may be garbage
            gc.freeze()
        if enabled:
            gc.enable()


class Slices:
    """Full collections in slices: each visits only what came since the one before, and freezes what survives it.

    A full collection holds the interpreter's lock while it visits every object: with 10,000 rollouts in flight these are 800,000, for a
    third of a second. The state of a rollout is freed by reference counts when that ends, frozen or not. Only a cycle that closes through
    a frozen object stays; therefore everything is visited after a growth of `GROWTH_BYTES`, whatever it came from.

    Attributes:
        whole: how often everything was visited.
    """

    def __init__(self) -> None:
        self.whole = 0
        self._visits_all = False
        self._bytes = 0
        self._statm: int | None = None

    def begin(self) -> None:
        """Spare what is there, and collect in slices from now on. Not for a process that runs code of others, who may count on cycles."""
        freeze_loaded()
        # Kept open: the collector may run when the process has no descriptor left.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._bytes = self.resident_bytes()
        gc.callbacks.append(self._collected)

    def end(self) -> None:
        """Leave collections as they were before `begin`."""
        gc.callbacks.remove(self._collected)
        gc.unfreeze()
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def resident_bytes(self) -> int:
        """Memory of this process that is in RAM."""
        assert self._statm is not None
        return int(os.pread(self._statm, 128, 0).split()[1]) * resource.getpagesize()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase != "stop" or info["generation"] != _FULL:
            return
        if self._visits_all:
            self._visits_all, self._bytes = False, self.resident_bytes()
            self.whole += 1
        elif self.resident_bytes() - self._bytes > GROWTH_BYTES:
            self._visits_all = True
            gc.unfreeze()  # nothing can be collected inside of a collection; the next full one follows soon
            return
        gc.freeze()
