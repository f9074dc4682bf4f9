"""The little that is corrected of a run's objects while an attempt runs: what a user has scaled, deleted or left behind."""

from __future__ import annotations

from rlrun_operator import render
from rlrun_operator.decide.engines import scaling
from rlrun_operator.decide.objects import parts
from rlrun_operator.decide.reading.children import is_ending, replicas, uid_of
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.names import ACCESS_ANNOTATION
from rlrun_operator.state import Apply, Delete, Manifest, Scale


def corrected(case: Case, attempt: int, begins: bool, in_hand: bool) -> list[Apply]:
    """Writes that put right what belongs to a running attempt. Where a foreign object is in the way, the rest goes on."""
    if case.taken is not None:
        return []
    lost = _lost_deployment(case, begins or in_hand)
    return [*lost, *_edited_budget(case, begins), *_moved_access(case, attempt, begins)]


def scales(case: Case) -> list[Scale]:
    """A trainer that a user has scaled returns to what it was made with."""
    if case.spec is None or case.statefulset is None or is_ending(case.statefulset):
        return []
    trainers = case.wanted.trainers
    if case.past.launched_attempt != case.past.attempt or replicas(case.statefulset) == trainers:
        return []
    return [Scale(case.trainer_ref, uid_of(case.statefulset), trainers)]


def engines_as_specified(case: Case) -> tuple[list[Scale], list[Apply]]:
    """Writes that keep the engines of a run whose attempt is over serving its guests."""
    return scaling.scaled(case, None)[1], _lost_deployment(case, False)


def lost_claim(case: Case, attempt: int) -> list[Manifest]:
    """A claim that went before any pod could use it."""
    gone = case.wanted.own_claim and case.claim is None
    return _prerequisite(case, attempt, "PersistentVolumeClaim") if gone else []


def lost_lease(case: Case, attempt: int) -> list[Apply]:
    """The Lease, which the orchestrator may renew but not make. Where it is refused, all else goes on."""
    made = _prerequisite(case, attempt, "Lease") if case.observed.lease is None else []
    return [Apply(lease, expect_absent=True) for lease in made]


def zombies(case: Case, attempt: int) -> list[Delete]:
    """Pods of an older attempt that appeared after all: a controller may act on a view of before."""
    return [Delete(pod.ref, pod.uid) for pod in case.group if pod.attempt < attempt and pod.deleted_at is None]


def _lost_deployment(case: Case, in_hand: bool) -> list[Apply]:
    """Engines never fail a run, so a deleted Deployment is made again within the attempt."""
    if in_hand or case.spec is None or case.forbidden or not case.serves or case.deployment is not None:
        return []
    made = render.workloads(case.context(case.spec, case.past.attempt)).inference
    return [] if made is None else [Apply(made, expect_absent=True)]


def _edited_budget(case: Case, begins: bool) -> list[Apply]:
    """The budget after an edit of `inference`, which a drain has to follow; applied until the edit is on record."""
    if begins or case.spec is None or not case.serves or case.generation == case.past.observed_generation:
        return []
    context = case.context(case.spec, case.past.attempt)
    if not render.has_engines_to_keep(context):
        return []
    return parts.applies(case, [render.eviction_budget(context)])


def _moved_access(case: Case, attempt: int, begins: bool) -> list[Apply]:
    """The orchestrator goes on renewing its Lease where the API server has other addresses than when the attempt began."""
    spec, network = case.spec, case.settings.network
    if begins or not network.discovered or spec is None or spec.network_policy.mode == "None":
        return []
    asking = [pod for pod in case.group if pod.role == "orchestrator" and pod.attempt == attempt]
    known = {(pod.manifest["metadata"].get("annotations") or {}).get(ACCESS_ANNOTATION) for pod in asking}
    if not asking or network.mark in (*known, case.observed.access):
        return []
    return parts.applies(case, [render.orchestrator_policy(case.context(spec, attempt))])


def _prerequisite(case: Case, attempt: int, kind: str) -> list[Manifest]:
    if case.past.launched_attempt != attempt or case.spec is None or case.taken is not None:
        return []
    made = render.prerequisites(case.context(case.spec, attempt)).create
    return [child for child in made if child["kind"] == kind]
