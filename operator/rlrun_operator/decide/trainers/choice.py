"""Choice of the size of an elastic trainer. Pure.

A trainer has one size in each attempt, so a change ends the attempt. It shrinks when pods have waited too long for nodes: to the number of
scheduled pods, if the layout can be divided by it. It only grows at a checkpoint, when there is room, and not before a delay that doubles
with each growth that did not find nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.config.models.parallel import Sizes

PATIENCE_SECONDS = 2.0
"""Time within which a healthy start finds nodes; until then no wait is reported."""
MOST_DOUBLINGS = 4
"""Maximum number of doublings of the delay until the next growth."""


@dataclass(frozen=True)
class Rules:
    """Settings of a run.

    Attributes:
        sizes: allowed numbers of pods.
        wait_seconds: time for which pods wait for nodes before the trainer shrinks.
        grow_seconds: minimum time until it grows again.
    """

    sizes: Sizes
    wait_seconds: float
    grow_seconds: float


@dataclass(frozen=True)
class Look:
    """State of the current attempt.

    Attributes:
        size: number of its trainer pods.
        placed: number of scheduled trainer pods.
        waited: seconds for which pods have waited for nodes; 0: all are scheduled.
        grows_in: seconds until it may grow.
        at_checkpoint: whether it trains and a checkpoint has just been completed.
        room: number of pods that fit into the cluster; None: unknown.
    """

    size: int
    placed: int
    waited: float = 0.0
    grows_in: float = 0.0
    at_checkpoint: bool = False
    room: int | None = None


@dataclass(frozen=True)
class Choice:
    """Size of the next attempt, and the reason for a change.

    Attributes:
        size: number of trainer pods; the current one if nothing changes.
        why: reason of the change; empty if nothing changes.
        waiting_on: cause of the wait for another size; None: the size is the largest one.
    """

    size: int
    why: str = ""
    waiting_on: str | None = None


def choose_size(look: Look, rules: Rules) -> Choice:
    """Return the new size of the trainer; a size other than `look.size` ends the attempt."""
    largest = max(rules.sizes.allowed, default=look.size)
    if look.placed < look.size:
        return _smaller_size(look, rules)
    if look.size >= largest:
        return Choice(look.size)
    if look.grows_in > 0:
        return Choice(
            look.size, waiting_on=f"it does not grow before growTime; then to {_count_pods(largest)} if there is room"
        )
    if look.room is not None and not _largest_within(look, rules, look.room):
        return Choice(
            look.size,
            waiting_on=f"there is room for {_count_pods(max(look.room, look.size))} and not for {_next_size(look, rules)}",
        )
    if not look.at_checkpoint:
        return Choice(look.size, waiting_on="the next complete checkpoint")
    if look.room is None:
        told = "the free capacity is unknown, and the operator tries it"
        return Choice(largest, f"{look.size} to {_count_pods(largest)}: {told}")
    size = _largest_within(look, rules, look.room)
    return Choice(size, f"{look.size} to {_count_pods(size)}: there is room for {look.room}")


def grow_delay(rules: Rules, growths: int) -> float:
    """Return the seconds from a change to fewer pods until the trainer may grow; `growths`: number of growths in a row without nodes."""
    return rules.grow_seconds * 2.0 ** min(growths, MOST_DOUBLINGS)


def _smaller_size(look: Look, rules: Rules) -> Choice:
    lacks = f"{look.size - look.placed} of {_count_pods(look.size)}"
    size = rules.sizes.at_most(min(look.placed, look.size - 1))
    if size is None or look.waited < rules.wait_seconds:
        goes_on = (
            f"it continues with {_count_pods(size)} after {rules.wait_seconds:g} s" if size else "fewer are not enough"
        )
        return Choice(
            look.size, waiting_on=f"nodes for {lacks}; {goes_on}" if look.waited >= PATIENCE_SECONDS else None
        )
    found = f"{lacks} found no node within {rules.wait_seconds:g} s"
    skipped = rules.sizes.left_out.get(look.placed)
    reason = f", and {_count_pods(look.placed)} do not divide: {skipped}".replace(";", ",") if skipped else ""
    return Choice(size, f"{look.size} to {_count_pods(size)}: {found}{reason}")


def _largest_within(look: Look, rules: Rules, room: int) -> int:
    """Return the largest size above the current one that fits into `room`; 0 if none does."""
    size = rules.sizes.at_most(room) or 0
    return size if size > look.size else 0


def _next_size(look: Look, rules: Rules) -> int:
    return min(size for size in rules.sizes.allowed if size > look.size)


def _count_pods(count: int) -> str:
    return f"{count} pod{'s' if count != 1 else ''}"
