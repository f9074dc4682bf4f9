"""What a process holds from its start to its end is not looked through again for garbage."""

from __future__ import annotations

import gc


def spare() -> None:
    """Call once all is loaded: what is there now is garbage at once, or never.

    Packages and tasks are hundreds of thousands of objects, and every full collection would visit all of them: a fifth of the CPU of a
    rollout whose environment costs nothing. See `gc.freeze`.
    """
    gc.collect()
    gc.freeze()
