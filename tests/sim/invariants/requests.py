"""Rules of the operator's requests, checked before execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlrun_operator.names import ROLE_LABEL, attempt_of
from rlrun_operator.status import reasons
from tests.sim.cluster.pods import owners
from tests.sim.invariants.common import TERMINAL, derived, is_of_the_run
from tests.sim.invariants.fleet import no_engine_goes_before_it_is_drained

if TYPE_CHECKING:
    from tests.sim.operator.process import Process, Request
    from tests.sim.world import World


NOTHING_FAILED = (
    "ends for another size of the trainer",
    "created again",
    "is replaced: ",
    "requests (",
    "maxSteps has grown",
    "is not of this run",
    "is being deleted",
    "starts with another API key",
)
"""Messages of restarts without a failure."""


def of_request(world: World, asked: Request, sender: Process) -> str | None:
    """Return the complaint of the first rule that a request would break."""
    world.memory.decided_on = sender.decided_on
    if world.api.refuses(asked.path, asked.body):
        return None
    for rule in REQUESTS if sender is world.operator else REQUESTS_OF_ANY:
        if (problem := rule(world, asked)) is not None:
            return f"{rule.__name__}: {problem} ({asked.what})"
    return None


def makes_workload(asked: Request) -> bool:
    """Whether the request creates a workload of the trainer or the orchestrator."""
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
        return None  # the end of a pass over a deleted run of this name
    if found is not None and (attempt_of(found["metadata"]) or 0) < status.get("attempt", 0):
        return None  # a late one of an earlier attempt
    if world.memory.edited:
        return None
    said = {c["type"]: c for c in status.get("conditions", ())}
    ending = any(said.get(kind, {}).get("status") == "True" for kind in (reasons.RESTARTING, *TERMINAL))
    completing = said.get(reasons.COMPLETE, {}).get("reason") in reasons.ENDING
    suspending = said.get(reasons.SUSPENDED, {}).get("reason") in reasons.SUSPENSION
    if not (ending or completing or suspending):
        return "nothing on record says why"
    restarting = said.get(reasons.RESTARTING, {})
    again = any(words in restarting.get("message", "") for words in NOTHING_FAILED)
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


def what_runs_is_not_applied_again(world: World, asked: Request) -> str | None:
    """Applies to a newly started operator and to another release."""
    status, run = world.status, world.run
    if not asked.content.startswith("application/apply") or world.memory.edited or run is None:
        return None
    if derived(status) != "Running" or run["metadata"]["generation"] != status.get("observedGeneration"):
        return None
    if world.rival is not None:
        return None  # each operator repairs objects that the other one may have repaired
    found = world.api.get(asked.body["kind"], asked.body["metadata"]["name"])
    if found is None or not is_of_the_run(world, found) or found["kind"] == "PodDisruptionBudget":
        return None  # the budget follows an edit
    if found["metadata"].get("managedFields") == []:
        return None  # it was edited
    return f"{found['kind']} {found['metadata']['name']} is there, and the run is Running"


def what_nobody_has_looked_at_is_not_written_over(world: World, asked: Request) -> str | None:
    """Objects of a previous run of this name are not adopted."""
    if not makes_workload(asked):
        return None
    name = asked.body["metadata"]["name"]
    found = world.api.get(asked.body["kind"], name)
    if found is None or owners(found) & owners(asked.body):
        return None
    return f"{found['kind']} {name} of attempt {attempt_of(found['metadata'])} belongs to another run"


def nothing_begins_that_shall_be_suspended(world: World, asked: Request) -> str | None:
    """Applies during suspension and before it, by the operator's knowledge at its decision."""
    if not makes_workload(asked):
        return None
    on_record, wanted = derived(world.status), world.memory.decided_on["spec"].get("suspend") is True
    if on_record == "Suspending" or (on_record == "Suspended" and wanted):
        return f"attempt {attempt_of(asked.body['metadata'])} begins in phase {on_record}"
    return None


def nothing_begins_before_its_admission_is_on_record(world: World, asked: Request) -> str | None:
    """With a queue, only counted pods are created."""
    if world.others is None or world.memory.edited or not asked.content.startswith("application/apply"):
        return None
    if not is_of_the_run(world, asked.body):
        return None
    makes = asked.body["kind"] == "Deployment" or makes_workload(asked)
    admitted = world.reason(reasons.ADMITTED)
    return f"Admitted is {admitted or 'not there'}" if makes and admitted != reasons.ROOM_FOUND else None


def the_log_of_a_complete_run_stays(world: World, asked: Request) -> str | None:
    """With `cleanupPolicy.onComplete: GPU`, the last orchestrator pod and its log stay, because it has no GPUs."""
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
    what_runs_is_not_applied_again,
    what_nobody_has_looked_at_is_not_written_over,
    nothing_begins_that_shall_be_suspended,
    nothing_begins_before_its_admission_is_on_record,
    the_log_of_a_complete_run_stays,
    no_engine_goes_before_it_is_drained,
)
REQUESTS_OF_ANY: tuple[Callable[[World, Request], str | None], ...] = (
    nothing_is_rendered_again_within_its_attempt,
    what_nobody_has_looked_at_is_not_written_over,
)
"""These also apply to a second operator with an older view; the other rules use the sender's knowledge."""
