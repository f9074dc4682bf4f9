"""Memory use of the orchestrator's side of the trainer channel."""

from __future__ import annotations

import gc
import json
import tracemalloc

from rlrun.protocol.messages.trainer_channel import EventList

STEPS = 2000
BYTES_PER_STEP = 8
"""Far less than the path of one version (80 bytes)."""


def test_read_events_keep_no_path_of_a_version() -> None:
    def read_events(first: int) -> int:
        """Return the traced memory after `STEPS` events, in bytes."""
        for step in range(first, first + STEPS):
            event = {"seq": step, "kind": "published", "step": step, "path": f"/data/run/weights/step_{step:08d}"}
            EventList.model_validate_json(json.dumps({"attempt": 1, "events": [event]}))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = read_events(1)
        growth = read_events(1 + STEPS) - before
    finally:
        tracemalloc.stop()
    assert growth / STEPS < BYTES_PER_STEP
