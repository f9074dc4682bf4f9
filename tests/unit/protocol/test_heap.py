"""What is loaded is not looked through again for garbage."""

from __future__ import annotations

import gc
import weakref

from rlrun.protocol import heap


class _Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_spared_after_what_is_garbage_is_gone() -> None:
    gc.disable()  # so that nobody else takes the garbage away
    try:
        garbage = weakref.ref(_Node())
        kept = _Node()
        heap.spare()
        assert garbage() is None
        assert gc.get_freeze_count() > 0
        assert not any(known is kept for known in gc.get_objects())
        later = _Node()
        assert any(known is later for known in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()
