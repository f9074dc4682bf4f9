"""Room for more trainer pods, if nodes may be read: their capacity without the other pods of this run. Pure.

Only a queue observes foreign pods, so its answer comes first. A growth into nodes that foreign pods use finds no node and is undone.
"""

from __future__ import annotations

from dataclasses import replace

from rlrun_operator import render
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ROLE_LABEL
from rlrun_operator.queue.fit import place_gang
from rlrun_operator.queue.gang import gang_of, rooms_of
from rlrun_operator.queue.model import Capacity
from rlrun_operator.queue.rooms import Rooms

_TRIED = 16
"""Maximum number of sizes to try, the largest first: packing thousands of pods takes long."""


def trainer_room(run: RunSnapshot, size: int) -> int | None:
    """Return the number of trainer pods that fit, `size` or a larger allowed one; None if unknown. `size`: current number of pods."""
    answer, nodes, spec = run.observed.admission, run.observed.nodes, run.spec
    if answer is not None and answer.room is not None:
        return max(size, answer.room)
    if nodes is None or spec is None:
        return None
    made = render.render_workloads(run.context(spec, run.past.attempt)).trainer
    if made is None:
        return None
    others = [pod for pod in run.observed.pods if (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) != "trainer"]
    rooms = Rooms(Capacity(rooms_of(nodes, others)))
    (pods,) = gang_of((made,))
    larger = sorted((n for n in spec.trainer.sizes.allowed if n > size), reverse=True)[:_TRIED]
    return next((n for n in larger if place_gang(rooms, [replace(pods, count=n)]) is not None), size)
