"""Roles of which no container has started with the present specification: until then, an edit takes effect at once.

No step can be trained without every role. While one has not started, nothing is lost by an edit, and the advice for a wrong image, a
missing Secret or a wrong label is to edit the specification. The rules of the API server read `status.unstarted`
(`rlrun.api.crd.frozen`), so a run of an older operator, which does not write it, stays frozen.
"""

from __future__ import annotations

from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ROLES, Role, attempt_of
from rlrun_operator.pods import Pod
from rlrun_operator.status import reasons
from rlrun_operator.status.change import NO_CHANGE, StatusChange
from rlrun_operator.status.conditions import ConditionUpdate, find_condition
from rlrun_operator.status.diagnose import MAKING_SECONDS

_KINDS = (reasons.SCHEDULED, reasons.PODS_READY, reasons.INFERENCE_AVAILABLE)


def at_beginning(run: RunSnapshot) -> StatusChange:
    """Return `status.unstarted` of a starting attempt: all roles of a new specification, otherwise the previous ones."""
    if run.past.attempt and run.past.spec_hash == run.spec_hash:
        return NO_CHANGE
    return StatusChange(unstarted=[role for role in ROLES if run.wanted.count(role)])


def with_unstarted_roles(run: RunSnapshot, attempt: int) -> StatusChange:
    """Return `status.unstarted` without the roles that have started in `attempt`."""
    return StatusChange(unstarted=unstarted_roles(run, attempt) or None) if run.past.unstarted else NO_CHANGE


def unstarted_roles(run: RunSnapshot, attempt: int) -> list[Role]:
    """Return the roles of `attempt` without a container that started with its specification."""
    started = {pod.role for pod in run.pods_of_attempt(attempt) if pod.has_run and _is_of_this_spec(run, attempt, pod)}
    return [role for role in run.past.unstarted or () if role not in started]


def find_stuck_role(run: RunSnapshot) -> tuple[Role, ConditionUpdate] | None:
    """Return a role that has not started, and the reason, if only a person can remove it; None if all roles may still start."""
    unstarted = unstarted_roles(run, run.past.attempt)
    for kind in _KINDS if unstarted else ():
        known = find_condition(run.past.conditions, kind)
        if known is None or known.status == "True" or known.reason not in reasons.NEVER_STARTS:
            continue
        role = next((role for role in unstarted if known.message.startswith(role)), None)
        if role is not None:
            return role, ConditionUpdate("False", known.reason, known.message)
    return None


def _is_of_this_spec(run: RunSnapshot, attempt: int, pod: Pod) -> bool:
    """Return False for an engine of an earlier specification, which is being replaced: engine pods have no attempt number."""
    owner = run.spot_deployment if pod.spot else run.deployment
    orchestrator = run.orchestrator(attempt)
    if pod.role != "inference" or owner is None or orchestrator is None or attempt_of(owner["metadata"]) != attempt:
        return True
    return pod.created_at >= orchestrator.created_at - MAKING_SECONDS
