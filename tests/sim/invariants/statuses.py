"""Rules of two consecutive statuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlrun_operator.status import failure_reasons, reasons
from tests.sim.invariants.common import TERMINAL, derived, is_group, may_go_on
from tests.sim.invariants.cost import the_parts_are_the_whole, what_is_counted_never_falls, what_is_counted_was_held

if TYPE_CHECKING:
    from tests.sim.world import World

Json = dict[str, Any]
FINAL = (reasons.PERMANENT_FAILURE, reasons.MAX_RESTARTS_EXCEEDED)
"""Reasons of a failure other than an invalid specification."""
TAKEN_AWAY = (failure_reasons.POD_DELETED, failure_reasons.POD_EVICTED, failure_reasons.NODE_LOST)
"""Reasons whose exit code shows how the pod was stopped instead of its cause."""


def attempts_rise_by_one(world: World, old: Json, new: Json) -> str | None:
    was, now = old.get("attempt", 0), new.get("attempt", 0)
    if now < was:
        return f"attempt {was} became {now}"
    taken = (new.get("lastFailure") or {}).get("reason") == failure_reasons.NUMBER_TAKEN
    if was and now > was + 1 and not taken:  # the first attempt follows those that pods of a deleted run report
        return f"attempt {was} became {now}"
    return None


def restarts_are_counted_once(world: World, old: Json, new: Json) -> str | None:
    for field_ in ("restarts", "restartsCountedTowardsMax"):
        was, now = old.get(field_, 0), new.get(field_, 0)
        fresh = field_ != "restarts" and now == 0 and _was_asked(old, new)
        last, before = new.get("lastFailure") or {}, old.get("lastFailure") or {}
        forgiven = field_ != "restarts" and now == was - 1 and not last.get("counted") and before.get("counted")
        if not (was <= now <= was + 1 or fresh or (forgiven and last.get("attempt") == before.get("attempt"))):
            return f"{field_} {was} became {now}"
    by_hand = world.memory.restarts_asked  # restarts of a run that failed before its next attempt started
    if new.get("restarts", 0) > new.get("attempt", 0) + by_hand:
        return f"{new['restarts']} restarts of {new.get('attempt', 0)} attempts"
    return None


def counted_restarts_stay_within_the_limit(world: World, old: Json, new: Json) -> str | None:
    limit = world.run["spec"]["failurePolicy"]["maxRestarts"] if world.run else 0
    counted = new.get("restartsCountedTowardsMax", 0)
    return f"{counted} counted restarts; maxRestarts is {limit}" if counted > limit else None


def disruptions_never_count(world: World, old: Json, new: Json) -> str | None:
    failed = world.cluster.failures - world.memory.failures_before
    counted = new.get("restartsCountedTowardsMax", 0)
    return f"{counted} restarts counted, {failed} processes failed" if counted > failed else None


def nobody_is_blamed_for_ending_when_told_to(world: World, old: Json, new: Json) -> str | None:
    last = new.get("lastFailure") or {}
    blamed = (last.get("attempt"), last.get("podName"), last.get("exitCode"))
    of_engine = (0, *blamed[1:])  # engines outlive attempts
    known = last == (old.get("lastFailure") or {}) or {blamed, of_engine} & world.cluster.ended
    if known or blamed[2] is None or last.get("reason") in TAKEN_AWAY:
        return None
    return f"{blamed[1]} of attempt {blamed[0]} did not end with {blamed[2]} by itself"


def the_end_is_the_end(world: World, old: Json, new: Json) -> str | None:
    before, now = derived(old), derived(new)
    grown = before == "Complete" and (world.run or {})["spec"]["maxSteps"] > (old.get("maxSteps") or 0)
    if before in TERMINAL and now != before and not (may_go_on(old) or grown or _was_asked(old, new)):
        return f"{before} became {now}"
    return None


def _was_asked(old: Json, new: Json) -> bool:
    """Whether a manual restart was requested with the annotation: only this gives a failed run another chance and a
    new budget.
    """
    return bool(new.get("restartRequestedAt")) and new.get("restartRequestedAt") != old.get("restartRequestedAt")


def a_suspension_that_has_begun_is_finished(world: World, old: Json, new: Json) -> str | None:
    """Afterwards no pod remains, which Suspended reports and `suspended_is_without_pods` checks. If the queue has room
    at that moment by an older plan (cached for a second, with its room reserved that long), the run's turn is in
    the same status: it is suspended and admitted, for the attempt that is over.
    """
    before, now = derived(old), derived(new)
    turn = ("Starting",) if old.get("attempt", 0) else ("Pending",)
    same = old.get("attempt", 0) == new.get("attempt", 0)
    ended = ("Suspended", "Queued", *turn) if _is_suspended(new) and same else ("Suspended",)
    if before == "Suspending" and now not in ("Suspending", *ended, "Completing", "Complete"):
        return f"Suspending became {now}"
    return None


def _is_suspended(status: Json) -> bool:
    """Whether the user or the queue has suspended the run."""
    return any(c["type"] == reasons.SUSPENDED and c["status"] == "True" for c in status.get("conditions", ()))


def suspended_is_without_pods(world: World, old: Json, new: Json) -> str | None:
    if not _is_suspended(new) or _is_suspended(old):
        return None
    if world.news or world.api.news:
        return None  # the operator has not received these pods and returns to Suspending when it does
    left = [pod["metadata"]["name"] for pod in world.api.all("Pod") if is_group(pod)]
    return f"Suspended with pods {left}" if left else None


def the_phase_follows_from_the_conditions(world: World, old: Json, new: Json) -> str | None:
    return f"phase {new.get('phase')}, but conditions say {derived(new)}" if new.get("phase") != derived(new) else None


def observed_generation_is_true(world: World, old: Json, new: Json) -> str | None:
    seen, there = new.get("observedGeneration", 0), world.run["metadata"]["generation"] if world.run else 0
    if not old.get("observedGeneration", 0) <= seen <= there:
        return f"observedGeneration {old.get('observedGeneration')} became {seen}; the generation is {there}"
    late = [c["type"] for c in new.get("conditions", ()) if (c.get("observedGeneration") or 0) > seen]
    return f"conditions of a later generation than the status: {late}" if late else None


def every_wait_has_a_reason(world: World, old: Json, new: Json) -> str | None:
    if new.get("reason") and new.get("message"):
        return None
    return f"phase {new.get('phase')} without reason or message"


def checkpoints_are_told_truly(world: World, old: Json, new: Json) -> str | None:
    volume, said, before = world.cluster.volume, new.get("checkpoint") or {}, old.get("checkpoint") or {}
    newest = said.get("latestCompleteStep") or 0
    known = 0 if world.rivals else before.get("latestCompleteStep") or 0  # each of two operators reports its own view
    if not known <= newest <= volume.complete:
        return f"latestCompleteStep {before.get('latestCompleteStep')} became {newest}; complete is {volume.complete}"
    resumed, attempt = said.get("resumedFromStep"), new.get("attempt", 0)
    if resumed is not None and resumed != volume.begun_at.get(attempt, resumed):
        return f"resumedFromStep {resumed}; attempt {attempt} began at {volume.begun_at[attempt]}"
    step = (new.get("progress") or {}).get("step") or 0
    if step > max(volume.step.values(), default=0):
        return f"progress.step {step}, which nobody has trained"
    ends = [max(0, volume.step[a] - start) for a in volume.step for b, start in volume.begun_at.items() if b > a]
    lost = said.get("stepsLostTotal") or 0
    return f"{lost} steps lost is more than there can be" if lost > sum(ends) else None


def only_what_lasts_fails_a_run(world: World, old: Json, new: Json) -> str | None:
    """A condition that can still change never fails a run, for any duration."""
    if derived(new) != "Failed" or derived(old) == "Failed":
        return None
    failed = next(c for c in new["conditions"] if c["type"] == reasons.FAILED)
    trainers = (world.run or {"spec": {}})["spec"].get("trainer", {}).get("replicas")
    wrong = world.memory.refused_for_good or not trainers or world.memory.was_invalid
    if failed["reason"] == reasons.INVALID_CONFIGURATION and wrong:
        return None
    return None if failed["reason"] in FINAL else f"Failed: {failed['reason']}: {failed['message']}"


def training_is_of_this_attempt(world: World, old: Json, new: Json) -> str | None:
    """An attempt of equal number of a previous run of this name does not count."""
    said = next((c for c in new.get("conditions", ()) if c["type"] == reasons.PROGRESSING), {})
    if said.get("reason") != reasons.TRAINING or world.run is None:
        return None
    reported = (world.run["metadata"]["uid"], new.get("attempt", 0)) in world.cluster.reported
    return None if reported else f"attempt {new.get('attempt')} trains, and has not reported anything"


def what_resumes_begins_an_attempt(world: World, old: Json, new: Json) -> str | None:
    """A suspended attempt has no pods, which would count as a failure. The run may wait for its next attempt as
    Restarting, if a name is taken, the claim is being deleted or a new key is recorded first, and as Starting while
    its turn in the queue is recorded: no pod is judged then.
    """
    over, goes_on = derived(old) == "Suspended", derived(new) in ("Starting", "Running", "Restarting")
    same = old.get("attempt", 0) == new.get("attempt", 0) > 0
    another_key = derived(new) == "Restarting" and new.get("keyAttempt") not in (None, old.get("keyAttempt"))
    restarting = next((c for c in new.get("conditions", ()) if c["type"] == reasons.RESTARTING), {})
    waits = derived(new) == "Restarting" and restarting.get("reason") in (reasons.NAME_TAKEN, reasons.CLAIM_DELETED)
    waits = waits or any((c["type"], c["status"]) == (reasons.SUSPENDED, "True") for c in new.get("conditions", ()))
    told = f"Suspended became {derived(new)} in attempt {new.get('attempt')}"
    return told if over and goes_on and same and not (another_key or waits) else None


def what_runs_has_a_number(world: World, old: Json, new: Json) -> str | None:
    phase = derived(new)
    return f"phase {phase} without an attempt" if phase in ("Starting", "Running") and not new.get("attempt") else None


STEPS: tuple[Callable[[World, Json, Json], str | None], ...] = (
    attempts_rise_by_one,
    restarts_are_counted_once,
    counted_restarts_stay_within_the_limit,
    disruptions_never_count,
    nobody_is_blamed_for_ending_when_told_to,
    the_end_is_the_end,
    the_phase_follows_from_the_conditions,
    observed_generation_is_true,
    every_wait_has_a_reason,
    checkpoints_are_told_truly,
    a_suspension_that_has_begun_is_finished,
    suspended_is_without_pods,
    only_what_lasts_fails_a_run,
    training_is_of_this_attempt,
    what_resumes_begins_an_attempt,
    what_runs_has_a_number,
    what_is_counted_was_held,
    what_is_counted_never_falls,
    the_parts_are_the_whole,
)
