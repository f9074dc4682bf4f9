"""Size of an elastic trainer: the choice, the room for more pods, and the facts about the attempt. Pure.

A trainer has one size in each attempt, so a change ends the attempt. It shrinks when pods have waited too long for nodes: to the number of
scheduled pods, if the layout can be divided by it. It only grows at a checkpoint, when there is room, and not before a delay that doubles
with each growth that did not find nodes.

If nodes may be read, the room is their capacity without the other pods of this run. Only a queue observes foreign pods, so its answer comes
first. A growth into nodes that foreign pods use finds no node and is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlrun.config.models.parallel import Sizes
from rlrun_operator import render
from rlrun_operator.decide import stall
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ROLE_LABEL
from rlrun_operator.queue.packing import Rooms, gang_of, place_gang, rooms_of
from rlrun_operator.queue.queue_model import Capacity
from rlrun_operator.state import Fact
from rlrun_operator.status import reasons, run_progress
from rlrun_operator.status.conditions import NO_CHANGE, StatusChange, attempt_started_at, true_since
from rlrun_operator.times import seconds_of

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
    # Missing nodes are judged first: without all of its pods the trainer does not train.
    largest = max(rules.sizes.allowed, default=look.size)
    if look.placed < look.size:
        return _smaller_size(look, rules)
    if look.size >= largest:
        return Choice(look.size)
    # The conditions of a growth: the delay, the room, a checkpoint. The first missing one is reported as the
    # cause of the wait.
    if look.grows_in > 0:
        return Choice(
            look.size, waiting_on=f"it does not grow before growTime; then to {_count_pods(largest)} if there is room"
        )
    if look.room is not None and not _largest_within(look, rules, look.room):
        return Choice(
            look.size,
            waiting_on=f"there is room for {_count_pods(max(look.room, look.size))} and not for {_next_size(look, rules)}",
        )
    # The restart loses the steps after the last checkpoint.
    if not look.at_checkpoint:
        return Choice(look.size, waiting_on="the next complete checkpoint")
    # An operator without rights to read nodes tries the largest size. A growth without nodes is undone, and
    # doubles the delay.
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
    # Not every number of pods divides the batch and the layout (decision 86).
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


_TRIED = 16
"""Maximum number of sizes to try, the largest first: packing thousands of pods takes long."""


def trainer_room(run: RunSnapshot, size: int) -> int | None:
    """Return the number of trainer pods that fit, `size` or a larger allowed one; None if unknown. `size`: current number of pods."""
    answer, nodes, spec = run.observed.admission, run.observed.nodes, run.spec
    # Only a queue observes foreign pods, so its answer precedes the capacity of the nodes.
    if answer is not None and answer.room is not None:
        return max(size, answer.room)
    if nodes is None or spec is None:
        return None
    made = render.render_workloads(run.context(spec, run.past.attempt)).trainer
    if made is None:
        return None
    # The trainer pods of this run are left out: the next attempt uses their resources.
    others = [pod for pod in run.observed.pods if (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) != "trainer"]
    rooms = Rooms(Capacity(rooms_of(nodes, others)))
    (pods,) = gang_of((made,))
    larger = sorted((n for n in spec.trainer.sizes.allowed if n > size), reverse=True)[:_TRIED]
    return next((n for n in larger if place_gang(rooms, [replace(pods, count=n)]) is not None), size)


LOOK_SECONDS = 60.0
"""Time for which nodes are requested before a growth is tried without knowledge of free nodes."""
CLOSE_SHARE = 4
"""A checkpoint is recent while at most 1/CLOSE_SHARE of an interval was trained after it."""


def with_trainer_size(run: RunSnapshot, report: run_progress.Report | None, change: StatusChange) -> StatusChange:
    """Return `status.trainer` of `change` with the wait for another size, and without failed growths once the attempt trains."""
    trainer = change.values().get("trainer")
    if trainer is None or run.beginning or run.host_name is not None:
        return NO_CHANGE
    look, rules = look_at(run), rules_of(run)
    waits = choose_size(look, rules).waiting_on if look is not None and rules is not None else None
    update: dict[str, object] = {"waiting_on": waits}
    if trainer.grown_from is not None and run_progress.is_training(report):
        update |= {"grown_from": None, "growths": None}
    return StatusChange(trainer=trainer.model_copy(update=update))


def wake_in(run: RunSnapshot) -> float | None:
    """Return the seconds until pods have waited long enough for nodes, or until the trainer may grow."""
    look, rules = look_at(run, asks_room=False), rules_of(run)
    if look is None or rules is None:
        return None
    left = rules.wait_seconds - look.waited if look.placed < look.size else look.grows_in
    return left if left > 0 else None


def request_facts(run: RunSnapshot) -> frozenset[Fact]:
    """Return the facts to read for the next pass: the nodes, if a trainer may grow."""
    look, rules = look_at(run, asks_room=False), rules_of(run)
    due = look is not None and rules is not None and look.placed == look.size < max(rules.sizes.allowed, default=0)
    return frozenset(("nodes",)) if due and look is not None and look.grows_in <= LOOK_SECONDS else frozenset()


def rules_of(run: RunSnapshot) -> Rules | None:
    """Return the settings of an elastic run, or None if it has a fixed size or no attempt may start."""
    spec = run.spec
    if spec is None or spec.trainer.elastic is None or run.forbidden_fields or not run.is_training_run:
        return None
    block = spec.trainer.elastic
    return Rules(spec.trainer.sizes, block.wait_seconds, block.grow_seconds)


def look_at(run: RunSnapshot, *, asks_room: bool = True) -> Look | None:
    """Return the state of the current attempt, or None if it is not complete yet, or has all pods scheduled with full size.

    Args:
        run: snapshot of the run.
        asks_room: whether to compute the room for more pods, which takes as long as a pass.
    """
    past, spec = run.past, run.spec
    if spec is None or spec.trainer.elastic is None or run.statefulset is None:
        return None
    # Before all workloads are observed, pods are missing because they are being created.
    if not past.launched_attempt == past.attempt == run.attempt > 0:
        return None
    size = run.wanted.trainers
    pods = [pod for pod in run.pods_of_attempt(past.attempt) if pod.role == "trainer"]
    placed = min(size, sum(pod.node is not None for pod in pods))
    if placed < size:
        return Look(
            size, placed, waited=_seconds_without_nodes(run, [pod.created_at for pod in pods if pod.node is None])
        )
    if past.trainer.size is None:  # it has all of its pods, although a pending edit may request more
        return None
    # The packing of pods onto nodes takes as long as a pass, so it is computed only when the delay is over.
    waits = _grows_in(run, known=True)
    if waits or not asks_room:
        return Look(size, placed, grows_in=waits)
    report, found = stall.read_report(run, past.attempt), trainer_room(run, size)
    return Look(size, placed, 0.0, _grows_in(run, known=found is not None), _at_checkpoint(run, report), found)


def _grows_in(run: RunSnapshot, *, known: bool) -> float:
    """Return the seconds until the trainer may grow; `known`: whether the free nodes are known."""
    rules, promised = rules_of(run), seconds_of(run.past.trainer.grow_time) or 0.0
    longest = grow_delay(rules, MOST_DOUBLINGS) if rules is not None else 0.0
    times = [promised if promised <= run.now + longest else 0.0]  # later than that: the clock was set
    if not known:  # an operator that has just started requests the nodes only now
        times.append((run.observed.watching_since or 0.0) + LOOK_SECONDS)
    return max(0.0, max(times) - run.now)


def _seconds_without_nodes(run: RunSnapshot, created: Sequence[float]) -> float:
    """Return the seconds for which the attempt's pods have lacked nodes, by the conditions, but at most the age of these pods.

    The conditions may be older than the pods if the operator died while it started the attempt.

    Args:
        run: snapshot of the run.
        created: creation times of the pods without a node, by the API server's clock.
    """
    waits = true_since(run.past.conditions, reasons.SCHEDULED, true=False)
    began = attempt_started_at(run.past.conditions)
    if waits is None or began is None:
        return 0.0
    made = min((time for time in created if time <= run.now), default=0.0)  # later than now: the clocks differ
    return max(0.0, run.now - max(waits, began, made))


def _at_checkpoint(run: RunSnapshot, report: run_progress.Report | None) -> bool:
    """Return whether a checkpoint of this attempt was completed since the last pass or recently: then little is lost even if the trainer is
    killed."""
    spec = run.spec
    if spec is None or report is None or report.step is None or report.checkpoint_step is None:
        return False
    silent = run_progress.silent_for(stall.silent_since(run, report), run.now)
    if not run_progress.is_training(report) or silent >= run_progress.HEARTBEAT_SECONDS or report.storage is not None:
        return False
    if report.checkpoint_step <= (report.resumed_from_step or 0):
        return False
    is_new = report.checkpoint_step != run.past.checkpoint.latest_complete_step
    return is_new or report.step - report.checkpoint_step <= spec.checkpoint.interval // CLOSE_SHARE
