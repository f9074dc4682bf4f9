"""Facts about an attempt that decide on its trainer's size, from the status and the observation."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun_operator.decide import stall
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.trainers.choice import MOST_DOUBLINGS, Look, Rules, choose_size, grow_delay
from rlrun_operator.decide.trainers.room import trainer_room
from rlrun_operator.state import Fact
from rlrun_operator.status import progress, reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange
from rlrun_operator.status.conditions import attempt_started_at, true_since
from rlrun_operator.times import seconds_of

LOOK_SECONDS = 60.0
"""Time for which nodes are requested before a growth is tried without knowledge of free nodes."""
CLOSE_SHARE = 4
"""A checkpoint is recent while at most 1/CLOSE_SHARE of an interval was trained after it."""


def with_trainer_size(run: RunSnapshot, report: progress.Report | None, change: StatusChange) -> StatusChange:
    """Return `status.trainer` of `change` with the wait for another size, and without failed growths once the attempt trains."""
    trainer = change.values().get("trainer")
    if trainer is None or run.beginning or run.host_name is not None:
        return NO_CHANGE
    look, rules = look_at(run), rules_of(run)
    waits = choose_size(look, rules).waiting_on if look is not None and rules is not None else None
    update: dict[str, object] = {"waiting_on": waits}
    if trainer.grown_from is not None and progress.is_training(report):
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
    if spec is None or spec.trainer.elastic is None or run.forbidden or not run.trains:
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


def _at_checkpoint(run: RunSnapshot, report: progress.Report | None) -> bool:
    """Return whether a checkpoint of this attempt was completed since the last pass or recently: then little is lost even if the trainer is
    killed."""
    spec = run.spec
    if spec is None or report is None or report.step is None or report.checkpoint_step is None:
        return False
    silent = progress.silent_for(stall.silent_since(run, report), run.now)
    if not progress.is_training(report) or silent >= progress.HEARTBEAT_SECONDS or report.storage is not None:
        return False
    if report.checkpoint_step <= (report.resumed_from_step or 0):
        return False
    is_new = report.checkpoint_step != run.past.checkpoint.latest_complete_step
    return is_new or report.step - report.checkpoint_step <= spec.checkpoint.interval // CLOSE_SHARE
