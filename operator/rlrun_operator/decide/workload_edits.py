"""Edits of a run's workloads: by other clients, and by its own specification before roles have started.

Other clients are `kubectl set image`, `kubectl edit` or a controller that does not take the operator into account. The managed fields of an
object (`managed_fields`) show which fields the operator has lost, and which client set them.

An edit of the specification takes effect at once until each role has a container that started with it. No step can be trained without every
role. While one has not started, nothing is lost by an edit, and the advice for a wrong image, a missing Secret or a wrong label is to edit
the specification. The rules of the API server read `status.unstarted` (`rlrun.api.crd.frozen_fields`), so a run of an older operator, which
does not write it, stays frozen.
"""

from __future__ import annotations

from typing import NamedTuple

from rlrun_operator import render
from rlrun_operator.decide.reading import desired_replicas, is_ending, rendering_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.managed_fields import unheld_fields
from rlrun_operator.names import ROLES, Ref, Role, attempt_of
from rlrun_operator.pods import Pod
from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import NO_CHANGE, ConditionUpdate, StatusChange, find_condition
from rlrun_operator.status.diagnose import MAKING_SECONDS

KINDS = ("StatefulSet", "Deployment", "Pod")
SHOWN = 4
"""Most fields that a message names."""
_KNOWN_MAX = 10_000
AUTOSCALERS = "kube-controller-manager"
"""Field manager of HorizontalPodAutoscalers, including those of KEDA."""
_SCALED = "spec.replicas"
"""Field that the operator, `kubectl scale` and autoscalers set; `engine_count` and `repairs` restore it."""
_PER_TIME = "spec.template.spec.affinity"
"""Field of a StatefulSet that changes with time: excluded nodes expire."""
_compared: dict[tuple[str, str], None] = {}
"""UID and held fields of intact workloads: rendering them takes longer than the rest of a pass."""


class Edits(NamedTuple):
    """Edited workloads of an attempt."""

    damage: dict[Ref, str]
    """Description of each edit."""
    restored: dict[Ref, Manifest]
    """Workloads that can be applied again now."""
    scaled: frozenset[Ref]
    """Workloads with a changed number of pods; `engine_count` and `repairs` restore it."""


def find_edits(run: RunSnapshot, context: render.RunContext, *, as_begun: bool) -> Edits:
    """Return the edited workloads of the current attempt.

    Args:
        run: snapshot of the run.
        context: inputs for rendering the attempt.
        as_begun: whether the specification has not changed since the start of the attempt. Otherwise nothing is rendered to compare
            with, and the next attempt renders all workloads anyway.
    """
    # Rendering takes as long as the rest of a pass, so nothing is rendered unless the managed fields show a
    # change by another client.
    found = [child for child in _list_workloads(run) if as_begun and _may_be_edited(child)]
    made = _render_workloads(context) if found else {}
    damage, restored = _edited_pod(run, context.attempt), dict[Ref, Manifest]()
    for child in found:
        ref = Ref(child["kind"], child["metadata"]["name"])
        if ref in made and (lost := lost_fields(child, made[ref])):
            damage[ref] = f"was edited ({_describe_edits(child, lost)})"
            restored[ref] = _with_replicas(made[ref], desired_replicas(child))
    # The number of pods is restored elsewhere, because engines must be drained before it falls. Here it is
    # only reported.
    scaled = _scaled_workloads(run)
    for ref, words in scaled.items():
        damage[ref] = f"{damage[ref]} and {words}" if ref in damage else words
    return Edits(damage, restored, frozenset(scaled))


def _scaled_workloads(run: RunSnapshot) -> dict[Ref, str]:
    """Return the workloads whose number of pods another client has changed."""
    wanted = {run.trainer_ref: (run.statefulset, run.wanted.trainers, "trainer.replicas")}
    field = "inference.autoscale" if run.is_autoscaled else "inference.replicas"
    wanted[run.inference_ref] = (run.deployment, run.wanted.engines - run.wanted.spot, field)
    wanted[run.spot_ref] = (run.spot_deployment, run.wanted.spot, field)
    result: dict[Ref, str] = {}
    for ref, (child, count, source) in wanted.items():
        edit = ((child or {}).get("edits") or {}).get(_SCALED)
        if edit is not None and child is not None and not is_ending(child) and desired_replicas(child) != count:
            words = f"was scaled to {desired_replicas(child)} by {edit[0]}, but {source} of the run makes it {count}"
            result[ref] = f"{words}; {_way_to_scale(run, ref, edit[0])}"
    return result


def _way_to_scale(run: RunSnapshot, ref: Ref, manager: str) -> str:
    """Return the field of the run with the same effect."""
    if ref == run.trainer_ref:
        return "a running trainer keeps its number of pods"
    if manager != AUTOSCALERS:
        return f"kubectl scale rlr {run.names.run} --replicas N scales the engines"
    found = f"kubectl get hpa -n {run.metadata.get('namespace', '')} lists it with target Deployment/{ref.name}"
    return f"a HorizontalPodAutoscaler or ScaledObject has to name RLRun {run.names.run} in scaleTargetRef: {found}"


def lost_fields(child: Manifest, made: Manifest) -> list[str]:
    """Return the paths of a workload's fields that the operator has applied and no longer owns.

    Args:
        child: cached workload.
        made: workload as rendered now. If `child` was rendered differently, its fields are not comparable, and none is returned.
    """
    if not _may_be_edited(child) or rendering_of(child) != rendering_of(made):
        return []
    lost = [
        path for path in unheld_fields(str(child["held"]), made) if path != _SCALED and not path.startswith(_PER_TIME)
    ]
    # An intact object is remembered until its managed fields change, because each comparison renders it.
    if not lost:
        _remember_edit(child)
    return lost


def _may_be_edited(child: Manifest) -> bool:
    if is_ending(child) or "held" not in child or child["held"] == child.get("accepted"):
        return False
    return (str(child["metadata"]["uid"]), child["held"]) not in _compared


def _remember_edit(child: Manifest) -> None:
    while len(_compared) >= _KNOWN_MAX:
        del _compared[next(iter(_compared))]
    _compared[(str(child["metadata"]["uid"]), child["held"])] = None


def _list_workloads(run: RunSnapshot) -> list[Manifest]:
    trainer = [run.statefulset] if run.statefulset is not None else []
    return [*trainer, *(child for _, child in run.engine_deployments)]


def _render_workloads(context: render.RunContext) -> dict[Ref, Manifest]:
    spot = render.spot_deployment(context)
    made = (*render.render_workloads(context).existing, *(() if spot is None else (spot,)))
    return {Ref(child["kind"], child["metadata"]["name"]): child for child in made}


def _with_replicas(made: Manifest, count: int) -> Manifest:
    """Keep the number of pods of a restored workload: engines are drained before they are removed."""
    return {**made, "spec": {**made["spec"], "replicas": count}}


def _edited_pod(run: RunSnapshot, attempt: int) -> dict[Ref, str]:
    """Report a changed image of the orchestrator. It cannot be restored: its container has ended by then."""
    pod = run.orchestrator(attempt)
    if pod is None or pod.deleted_at is not None:
        return {}
    images = [path for path in pod.manifest.get("edits") or () if path.endswith(".image")]
    return {pod.ref: f"was edited ({_describe_edits(pod.manifest, images)})"} if images else {}


def _describe_edits(child: Manifest, lost: list[str]) -> str:
    """Describe fields with their new values and field managers."""
    found = child.get("edits") or {}
    shown = []
    for path in lost[:SHOWN]:
        own = next((name for name in found if name == path or name.startswith((f"{path}.", f"{path}["))), None)
        if own is None:
            shown.append(f"{path} was removed")
            continue
        manager, value = found[own]
        shown.append(f"{own} is now {value}, set by {manager}" if value else f"{own} was set by {manager}")
    return "; ".join(shown) + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")


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
    # The condition's message starts with the role. A role that has started once may wait for a restart, and
    # is not stuck.
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
