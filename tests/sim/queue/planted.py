"""Planted bugs of admission that the simulation must find."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlrun_operator.queue import admit, packing, preemption, shares
from tests.sim.planted.plant import Plant, put
from tests.sim.queue.draw import contended_world, crowded_world, random_world, saturated_world
from tests.sim.queue.invariants import BrokenError, Checks, at_the_end, fair
from tests.sim.queue.world import World


def live(seed: int, reached: Counter[str] | None = None) -> str | None:
    """Run one random world; return its broken invariant, or None."""
    crowded = seed % 10 == 9
    world = crowded_world(seed) if crowded else random_world(seed)
    return _broken(Checks(world), _nothing if crowded else at_the_end, reached)


def live_contended(seed: int, reached: Counter[str] | None = None) -> str | None:
    """Run a world in which one namespace has borrowed the shares of others."""
    return _broken(Checks(contended_world(seed)), at_the_end, reached)


def live_saturated(seed: int) -> str | None:
    """Run a world in which all namespaces always want more than the capacity."""
    with contextlib.ExitStack() as stack:
        _explain_equal_runs_once(stack)
        return _broken(Checks(saturated_world(seed), promises=()), fair)


def _explain_equal_runs_once(stack: contextlib.ExitStack) -> None:
    """Explain the wait of one run per kind of gang in a pass: dozens of equal ones take two thirds of the simulation's
    time.
    """
    original = admit._Pass._wait_of

    def wait_of(self: Any, run: Any) -> Any:
        known = self.__dict__.setdefault("_explained", {})
        if id(run.gang) not in known:
            known[id(run.gang)] = original(self, run)
        return known[id(run.gang)]

    put(stack, admit._Pass, "_wait_of", wait_of)


def _broken(checks: Checks, then: Callable[[World], None], reached: Counter[str] | None = None) -> str | None:
    try:
        checks.world.live()
        then(checks.world)
    except BrokenError as error:
        return str(error)
    if reached is not None:
        reached.update(checks.reached)
    return None


def _nothing(world: World) -> None:
    """Check nothing for a world that was stopped early."""


def hunt(plant: Plant, seeds: range, one: Callable[[int], str | None] = live) -> int | None:
    """Return the first seed that finds a planted bug, or None."""
    with contextlib.ExitStack() as stack:
        plant(stack)
        return next((seed for seed in seeds if one(seed) is not None), None)


def ending_pods_hold_nothing(stack: contextlib.ExitStack) -> None:
    """Room is given away before its pods are gone."""
    original = preemption.bound_requests

    def bound(rooms: Any, run: Any, *, ending: bool) -> Any:
        return {} if ending else original(rooms, run, ending=False)

    put(stack, preemption, "bound_requests", bound)


def an_admission_is_forgotten_until_it_is_recorded(stack: contextlib.ExitStack) -> None:
    """The same room is given away twice."""
    put(stack, admit, "GRANT_SECONDS", 0.0)


def no_room_is_kept(stack: contextlib.ExitStack) -> None:
    """Small runs pass a big one without limit."""
    put(stack, admit._Pass, "_has_waited", lambda self, head: False)


def room_that_is_kept_is_given_away(stack: contextlib.ExitStack) -> None:
    """Reservations have no effect."""
    put(stack, admit._Pass, "_open_to", lambda self, run: self.rooms)


def victims_do_not_have_to_be_enough(stack: contextlib.ExitStack) -> None:
    """Runs are preempted although nothing can start."""
    original = preemption.choose_victims

    def victims(rooms: Any, head: Any, held: Any, *rest: Any) -> Any:
        found = original(rooms, head, held, *rest)
        lower = [run for run in held if run.priority < head.priority]
        return found if found is not None or not lower else (lower[:1], {})

    put(stack, admit, "choose_victims", victims)


def a_namespace_under_its_share_is_preempted(stack: contextlib.ExitStack) -> None:
    """Two namespaces take each other's room in turn."""

    def may(run: Any, head: Any, *rest: Any) -> bool:
        return bool(run.priority == head.priority and run.namespace != head.namespace)

    put(stack, preemption, "_may_preempt", may)


def priority_does_not_count(stack: contextlib.ExitStack) -> None:
    """Runs start in order of arrival, for any priority."""
    original = shares.Shares.sort_key
    put(stack, shares.Shares, "sort_key", lambda self, run: (0, *original(self, run)[1:]))


def what_finds_no_room_is_never_released(stack: contextlib.ExitStack) -> None:
    """Two runs with half of their pods each wait for each other."""
    put(stack, preemption, "run_to_release", lambda *args: None)


def pods_are_not_packed(stack: contextlib.ExitStack) -> None:
    """Free GPUs are summed over nodes."""

    def place(rooms: Any, gang: Any) -> Any:
        room = next(iter(rooms.free), None)
        return {room: {}} if room is not None and packing._has_enough(rooms, gang) else None

    for module in (admit, preemption, preemption):
        put(stack, module, "place_gang", place)


def several_begin_at_once_in_the_dark(stack: contextlib.ExitStack) -> None:
    """With unknown capacity all runs start, each gets a part, and none is released."""
    original = admit._Pass._room_for
    put(stack, admit._Pass, "_room_for", lambda self, run: {} if self.rooms is None else original(self, run))
    put(stack, preemption, "run_to_release", lambda *args: None)


def a_young_run_is_preempted_for_a_share(stack: contextlib.ExitStack) -> None:
    original = preemption._may_preempt

    def may(run: Any, *rest: Any) -> bool:
        return original(replace(run, started=float("-inf")), *rest)

    put(stack, preemption, "_may_preempt", may)


def more_runs_are_preempted_than_needed(stack: contextlib.ExitStack) -> None:
    def needed(trial: Any, head: Any, chosen: Any, charges: Any) -> Any:
        return chosen, packing.place_gang(trial, head.gang) or {}

    put(stack, preemption, "_spare_unneeded", needed)


def releases_do_not_move_a_run_to_the_end(stack: contextlib.ExitStack) -> None:
    put(stack, admit, "TRIES", 1000)


def runs_start_that_the_scheduler_could_put_into_kept_room(stack: contextlib.ExitStack) -> None:
    put(stack, admit._Pass, "_may_take_reserved", lambda self, pods, kept: False)


def an_admitted_run_without_room_holds_back_no_other(stack: contextlib.ExitStack) -> None:
    class Blind(set[str]):
        def __contains__(self, uid: object) -> bool:
            return False

    original = preemption.charge_holdings

    def hold(*args: Any) -> Any:
        held = original(*args)
        held.homeless = Blind(held.homeless)
        return held

    put(stack, preemption, "charge_holdings", hold)


def arrival_does_not_count(stack: contextlib.ExitStack) -> None:
    original = shares.Shares.sort_key

    def sort_key(self: Any, run: Any) -> Any:
        priority, share, since, uid = original(self, run)
        return priority, share, -since, uid

    put(stack, shares.Shares, "sort_key", sort_key)


def weights_do_not_count(stack: contextlib.ExitStack) -> None:
    """All namespaces get equal shares."""
    original = shares.Shares.sort_key

    def sort_key(self: Any, run: Any) -> Any:
        priority, _, *rest = original(self, run)
        return (
            priority,
            shares.PAST_WEIGHT * self.past.get(run.namespace, 0.0) + self.now.get(run.namespace, 0.0),
            *rest,
        )

    put(stack, shares.Shares, "sort_key", sort_key)


PLANTED: tuple[Plant, ...] = (
    ending_pods_hold_nothing,
    an_admission_is_forgotten_until_it_is_recorded,
    no_room_is_kept,
    room_that_is_kept_is_given_away,
    victims_do_not_have_to_be_enough,
    a_namespace_under_its_share_is_preempted,
    priority_does_not_count,
    what_finds_no_room_is_never_released,
    pods_are_not_packed,
    several_begin_at_once_in_the_dark,
    releases_do_not_move_a_run_to_the_end,
)
CONTENDED: tuple[Plant, ...] = (
    a_young_run_is_preempted_for_a_share,
    more_runs_are_preempted_than_needed,
    runs_start_that_the_scheduler_could_put_into_kept_room,
    an_admitted_run_without_room_holds_back_no_other,
    arrival_does_not_count,
)
"""Bugs that `live_contended` finds."""
