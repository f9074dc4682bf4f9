"""The little that is corrected of a run's objects while an attempt runs: what a user has scaled, deleted or left behind."""

from __future__ import annotations

from rlrun_operator import render
from rlrun_operator.decide.engines import scaling
from rlrun_operator.decide.objects import parts
from rlrun_operator.decide.reading.children import desired_replicas, is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ACCESS_ANNOTATION
from rlrun_operator.state import Apply, Delete, Manifest, Scale


def correct_objects(run: RunSnapshot, attempt: int, begins: bool, in_hand: bool) -> list[Apply]:
    """Writes that put right what belongs to a running attempt. Where a foreign object is in the way, the rest goes on."""
    if run.taken is not None:
        return []
    lost = _lost_deployment(run, begins or in_hand)
    return [*lost, *_edited_budget(run, begins), *_moved_access(run, attempt, begins)]


def restore_trainer_size(run: RunSnapshot) -> list[Scale]:
    """A trainer that a user has scaled returns to what it was made with."""
    if run.spec is None or run.statefulset is None or is_ending(run.statefulset):
        return []
    trainers = run.wanted.trainers
    if run.past.launched_attempt != run.past.attempt or desired_replicas(run.statefulset) == trainers:
        return []
    return [Scale(run.trainer_ref, uid_of(run.statefulset), trainers)]


def restore_engines_for_guests(run: RunSnapshot) -> tuple[list[Scale], list[Apply]]:
    """Writes that keep the engines of a run whose attempt is over serving its guests."""
    return scaling.scale_pools(run, None)[1], _lost_deployment(run, False)


def lost_claim(run: RunSnapshot, attempt: int) -> list[Manifest]:
    """A claim that went before any pod could use it."""
    gone = run.wanted.own_claim and run.claim is None
    return _missing_prerequisite(run, attempt, "PersistentVolumeClaim") if gone else []


def lost_lease(run: RunSnapshot, attempt: int) -> list[Apply]:
    """The Lease, which the orchestrator may renew but not make. Where it is refused, all else goes on."""
    made = _missing_prerequisite(run, attempt, "Lease") if run.observed.lease is None else []
    return [Apply(lease, expect_absent=True) for lease in made]


def delete_stale_pods(run: RunSnapshot, attempt: int) -> list[Delete]:
    """Pods of an older attempt that appeared after all: a controller may act on a view of before."""
    return [Delete(pod.ref, pod.uid) for pod in run.group if pod.attempt < attempt and pod.deleted_at is None]


def _lost_deployment(run: RunSnapshot, in_hand: bool) -> list[Apply]:
    """Engines never fail a run, so a deleted Deployment is made again within the attempt."""
    if in_hand or run.spec is None or run.forbidden or not run.serves or run.deployment is not None:
        return []
    made = render.render_workloads(run.context(run.spec, run.past.attempt)).inference
    return [] if made is None else [Apply(made, expect_absent=True)]


def _edited_budget(run: RunSnapshot, begins: bool) -> list[Apply]:
    """The budget after an edit of `inference`, which a drain has to follow; applied until the edit is on record."""
    if begins or run.spec is None or not run.serves or run.generation == run.past.observed_generation:
        return []
    context = run.context(run.spec, run.past.attempt)
    if not render.has_engines_to_keep(context):
        return []
    return parts.apply_parts(run, [render.eviction_budget(context)])


def _moved_access(run: RunSnapshot, attempt: int, begins: bool) -> list[Apply]:
    """The orchestrator goes on renewing its Lease where the API server has other addresses than when the attempt began."""
    spec, network = run.spec, run.settings.network
    if begins or not network.discovered or spec is None or spec.network_policy.mode == "None":
        return []
    asking = [pod for pod in run.group if pod.role == "orchestrator" and pod.attempt == attempt]
    known = {(pod.manifest["metadata"].get("annotations") or {}).get(ACCESS_ANNOTATION) for pod in asking}
    if not asking or network.mark in (*known, run.observed.access):
        return []
    return parts.apply_parts(run, [render.orchestrator_policy(run.context(spec, attempt))])


def _missing_prerequisite(run: RunSnapshot, attempt: int, kind: str) -> list[Manifest]:
    if run.past.launched_attempt != attempt or run.spec is None or run.taken is not None:
        return []
    made = render.render_prerequisites(run.context(run.spec, attempt)).create
    return [child for child in made if child["kind"] == kind]
