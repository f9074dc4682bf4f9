"""What must hold in every history. A rule says what is wrong, or None; a new one is one more function in a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rlrun_operator import reasons
from rlrun_operator.conditions import phase
from rlrun_operator.names import ROLE_LABEL, attempt_of, run_uid_of
from tests.sim.cluster import owners

if TYPE_CHECKING:
    from tests.sim.process import Request
    from tests.sim.world import World

Json = dict[str, Any]
TAKEN_AWAY = (reasons.POD_DELETED, reasons.POD_EVICTED, reasons.NODE_LOST)
"""Whose exit code is of how it was stopped, and not of why."""
TERMINAL = ("Complete", "Failed")
WRITES_AT_MOST = 60
"""Requests that change something which a run costs, whatever happens to it ..."""
WRITES_OF_AN_ATTEMPT = 40
"""... and each of its attempts ..."""
WRITES_OF_AN_ACTION = 12
"""... and each thing that happens."""


@dataclass
class Memory:
    """What was true before, of the run that has the name now."""

    failures_before: int = 0
    """Processes that had failed when the run was made."""
    status: Json = field(default_factory=dict)
    """As it was checked last."""
    edited: bool = False
    """Somebody else wrote into it after the operator did."""
    actions: int = 0


def of_state(world: World) -> str | None:
    """The first rule that the present state breaks."""
    for rule in STATES:
        if (problem := rule(world)) is not None:
            return f"{rule.__name__}: {problem}"
    memory, status = world.memory, world.status
    if not status or status is memory.status:
        return None
    old, memory.status = memory.status, status
    if memory.edited:
        if _is_edited(old, status):
            memory.status = old
            return None
        memory.edited = False
    for step in STEPS:
        if (problem := step(world, old, status)) is not None:
            return f"{step.__name__}: {problem}"
    return None


def _is_edited(old: Json, status: Json) -> bool:
    """Whether anything of what somebody wrote is left: what the operator wrote before it heard of that may lie over a part of it."""
    left = (
        status.get("message") == "edited" or status.get("reason") == "Edited" or status.get("phase") != derived(status)
    )
    return left or status.get("observedGeneration", 0) < old.get("observedGeneration", 0)


# ---- of states


def never_two_attempts_at_once(world: World) -> str | None:
    group = [pod for pod in world.api.all("Pod") if is_group(pod)]
    alive = {attempt_of(pod["metadata"]) for pod in group}
    made_by = {(pod["metadata"]["labels"][ROLE_LABEL], *owners(pod)) for pod in group}
    if len(alive) > 1 or len(made_by) > len({role for role, *_ in made_by}):
        return f"trainer or orchestrator pods of attempts {sorted(map(str, alive))}, made by {sorted(made_by)}"
    return None


def the_operator_never_takes_back_what_it_has_seen(world: World) -> str | None:
    return world.operator.store.wrong


STATES: tuple[Callable[[World], str | None], ...] = (
    never_two_attempts_at_once,
    the_operator_never_takes_back_what_it_has_seen,
)


# ---- of status writes


def attempts_rise_by_one(world: World, old: Json, new: Json) -> str | None:
    was, now = old.get("attempt", 0), new.get("attempt", 0)
    if now < was:
        return f"attempt {was} became {now}"
    taken = (new.get("lastFailure") or {}).get("reason") == reasons.NUMBER_TAKEN
    if was and now > was + 1 and not taken:  # the first one comes after those that pods of a deleted run tell of
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
    by_hand = bool(new.get("restartRequestedAt"))  # of a run that failed before its next attempt began
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
    """By hand, with the annotation: that alone gives a run that has failed another chance, and a fresh budget."""
    return bool(new.get("restartRequestedAt")) and new.get("restartRequestedAt") != old.get("restartRequestedAt")


def a_suspension_that_has_begun_is_finished(world: World, old: Json, new: Json) -> str | None:
    before, now = derived(old), derived(new)
    if before == "Suspending" and now not in ("Suspending", "Suspended", "Completing", "Complete"):
        return f"Suspending became {now}"
    return None


def suspended_is_without_pods(world: World, old: Json, new: Json) -> str | None:
    if derived(new) != "Suspended" or derived(old) == "Suspended":
        return None
    if world.news or world.api.news:
        return None  # pods that the operator has not heard of: it goes back to Suspending when it does
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
    if not (before.get("latestCompleteStep") or 0) <= newest <= volume.complete:
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
)


# ---- of requests


def of_request(world: World, asked: Request) -> str | None:
    """The first rule that a request would break."""
    for rule in REQUESTS:
        if (problem := rule(world, asked)) is not None:
            return f"{rule.__name__}: {problem} ({asked.what})"
    return None


def makes_workload(asked: Request) -> bool:
    """Whether it is what a run's trainer or orchestrator is made of."""
    return (
        asked.writes and asked.content.startswith("application/apply") and asked.body["kind"] in ("StatefulSet", "Pod")
    )


def the_cause_is_on_record_before_anything_is_removed(world: World, asked: Request) -> str | None:
    status, name = world.status, asked.path.rsplit("/", 1)[1]
    removes = asked.method == "DELETE" and "/pods/" in asked.path
    stops = asked.method == "PATCH" and "/statefulsets/" in asked.path and asked.body["spec"].get("replicas") == 0
    found = world.api.get("Pod", name) if removes else None
    if found is not None and "deletionTimestamp" in found["metadata"]:
        return None
    target = world.api.get("StatefulSet", name) if stops else found
    if target is None or not is_of_the_run(world, target):
        return None  # the end of a pass over a run of this name that was deleted meanwhile
    if found is not None and (attempt_of(found["metadata"]) or 0) < status.get("attempt", 0):
        return None  # a late one of an attempt that is over
    if world.memory.edited:
        return None
    said = {c["type"]: c for c in status.get("conditions", ())}
    ending = any(said.get(kind, {}).get("status") == "True" for kind in (reasons.RESTARTING, *TERMINAL))
    completing = said.get(reasons.COMPLETE, {}).get("reason") in reasons.ENDING
    suspending = said.get(reasons.SUSPENDED, {}).get("reason") in reasons.SUSPENSION
    if not (ending or completing or suspending):
        return "nothing on record says why"
    restarting = said.get(reasons.RESTARTING, {})
    again = any(words in restarting.get("message", "") for words in ("made again", "asks (", "maxSteps has grown"))
    failure = status.get("lastFailure") or {}
    if restarting.get("status") == "True" and not again and failure.get("attempt") != status.get("attempt"):
        return f"lastFailure is of attempt {failure.get('attempt')}"
    return None


def nothing_is_rendered_again_within_its_attempt(world: World, asked: Request) -> str | None:
    if not asked.content.startswith("application/apply"):
        return None
    kind, meta = asked.body["kind"], asked.body["metadata"]
    found = world.api.get(kind, meta["name"]) if kind in ("StatefulSet", "Pod") else None
    if found is None or not owners(found) & owners(asked.body):
        return None
    now, then = attempt_of(meta) or 0, attempt_of(found["metadata"]) or 0
    return f"{kind} of attempt {then} rendered for attempt {now}" if now <= then else None


def what_nobody_has_looked_at_is_not_written_over(world: World, asked: Request) -> str | None:
    """What an earlier run of the name has left is not taken over."""
    if not makes_workload(asked):
        return None
    name = asked.body["metadata"]["name"]
    found = world.api.get(asked.body["kind"], name)
    if found is None or owners(found) & owners(asked.body):
        return None
    return f"{found['kind']} {name} of attempt {attempt_of(found['metadata'])} belongs to another run"


def nothing_begins_that_shall_be_suspended(world: World, asked: Request) -> str | None:
    """Neither on the way into suspension nor in it, as far as the operator knew when it decided."""
    if not makes_workload(asked):
        return None
    on_record, wanted = derived(world.status), world.operator.decided_on["spec"].get("suspend") is True
    if on_record == "Suspending" or (on_record == "Suspended" and wanted):
        return f"attempt {attempt_of(asked.body['metadata'])} begins in phase {on_record}"
    return None


def the_log_of_a_complete_run_stays(world: World, asked: Request) -> str | None:
    """`cleanupPolicy.onComplete` is GPU: the orchestrator's pod of the last attempt has none, and its log."""
    if asked.method != "DELETE" or "/pods/" not in asked.path or derived(world.status) != "Complete":
        return None
    found = world.api.get("Pod", asked.path.rsplit("/", 1)[1])
    if found is None or not is_of_the_run(world, found) or found["metadata"]["labels"][ROLE_LABEL] != "orchestrator":
        return None
    last = attempt_of(found["metadata"]) == world.status.get("attempt")
    return "the orchestrator's pod has the run's log" if last and "deletionTimestamp" not in found["metadata"] else None


REQUESTS: tuple[Callable[[World, Request], str | None], ...] = (
    the_cause_is_on_record_before_anything_is_removed,
    nothing_is_rendered_again_within_its_attempt,
    what_nobody_has_looked_at_is_not_written_over,
    nothing_begins_that_shall_be_suspended,
    the_log_of_a_complete_run_stays,
)


# ---- when the faults have stopped


def at_rest(world: World) -> str | None:
    """What is still missing of a state that is good or final."""
    run, status, cluster = world.run, world.status, world.cluster
    if run is None:
        return None
    if status.get("phase") not in ("Running", "Suspended", *TERMINAL):
        return f"no rest: phase {status.get('phase')}: {status.get('reason')}: {status.get('message')}"
    if status.get("observedGeneration") != run["metadata"]["generation"]:
        return f"observedGeneration {status.get('observedGeneration')}, generation {run['metadata']['generation']}"
    if status["phase"] != derived(status):
        return f"phase {status['phase']}, conditions say {derived(status)}"
    counts = {role: len(cluster.pods(role)) for role in ("trainer", "orchestrator", "inference")}
    if status["phase"] == "Suspended":
        if not run["spec"].get("suspend"):
            return f"no rest: Suspended, and spec.suspend is not true: {status.get('message')}"
        return f"no rest: {counts} in phase Suspended" if any(counts.values()) else None
    if status["phase"] in TERMINAL:
        return f"no rest: {counts} in phase {status['phase']}" if counts["trainer"] or counts["inference"] else None
    wanted = {"trainer": world.trainers, "orchestrator": 1, "inference": run["spec"]["inference"]["replicas"]}
    if counts != wanted:
        return f"no rest: {counts} pods, wanted {wanted}"
    attempts = {attempt_of(pod["metadata"]) for pod in world.api.all("Pod") if is_group(pod)}
    return None if attempts == {status["attempt"]} else f"no rest: attempts {attempts}, status {status['attempt']}"


def of_writes(world: World) -> str | None:
    """Whether the run has cost more requests than its history explains."""
    attempts = world.status.get("attempt", 0)
    most = WRITES_AT_MOST + WRITES_OF_AN_ATTEMPT * (attempts + world.lives) + WRITES_OF_AN_ACTION * world.memory.actions
    return f"{world.api.writes} writes for {attempts} attempts" if world.api.writes > most else None


class Said(NamedTuple):
    """What the phase reads of a condition."""

    type: str
    status: str
    reason: str


def derived(status: Json) -> str:
    """The phase that the conditions say."""
    said = [Said(c["type"], c["status"], c["reason"]) for c in status.get("conditions", ())]
    return phase(said)  # type: ignore[arg-type]


def may_go_on(status: Json) -> bool:
    """Whether a run that has ended may begin again: its specification alone was wrong, or not allowed."""
    failed = next((c for c in status.get("conditions", ()) if c["type"] == reasons.FAILED), {})
    return failed.get("reason") in (reasons.INVALID_CONFIGURATION, reasons.FORBIDDEN)


def is_of_the_run(world: World, child: Json) -> bool:
    """Whether it belongs to the run that has the name now, and not to one that had it before."""
    if world.run is None:
        return False
    uid = world.run["metadata"]["uid"]
    return uid in owners(child) or run_uid_of(child["metadata"]) == uid


def is_group(pod: Json) -> bool:
    """Whether a pod belongs to an attempt."""
    return pod["metadata"]["labels"].get(ROLE_LABEL) in ("trainer", "orchestrator")
