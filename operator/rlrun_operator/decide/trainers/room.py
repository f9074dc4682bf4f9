"""Room for more pods of a trainer, where nodes may be read: what they have, without what this run itself has of it. Pure.

Pods of others are seen by a queue alone, whose answer comes first. A growth into what they hold finds no node, and is taken back.
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
"""Sizes that are tried, the largest ones first: packing thousands of pods takes long."""


def trainer_room(run: RunSnapshot, size: int) -> int | None:
    """Number of trainer pods that there is room for, `size` or an allowed larger one; None: not known. `size`: pods that there are."""
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
