"""Repairs during an attempt: undo manual scaling, recreate deleted objects, delete leftovers."""

from __future__ import annotations

from rlrun_operator import render
from rlrun_operator.decide.engines import scaling
from rlrun_operator.decide.objects import parts
from rlrun_operator.decide.reading.children import desired_replicas, is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import ACCESS_ANNOTATION
from rlrun_operator.state import Apply, Create, Delete, Manifest, Scale


def correct_objects(run: RunSnapshot, attempt: int, begins: bool, in_hand: bool) -> list[Apply]:
    """Return the applies that repair a running attempt. A foreign object with a child's name does not stop the other repairs."""
    if run.taken is not None:
        return []
    lost = _lost_deployment(run, begins or in_hand)
    return [*lost, *_edited_budget(run, begins), *_moved_access(run, attempt, begins)]


def restore_trainer_size(run: RunSnapshot) -> list[Scale]:
    """Scale a manually scaled trainer back to its size."""
    if run.spec is None or run.statefulset is None or is_ending(run.statefulset):
        return []
    trainers = run.wanted.trainers
    if run.past.launched_attempt != run.past.attempt or desired_replicas(run.statefulset) == trainers:
        return []
    return [Scale(run.trainer_ref, uid_of(run.statefulset), trainers)]


def restore_engines_for_guests(run: RunSnapshot) -> tuple[list[Scale], list[Apply]]:
    """Return the writes that keep engines serving the guests of a run whose attempt has ended."""
    return scaling.scale_pools(run, None)[1], _lost_deployment(run, False)


def lost_claim(run: RunSnapshot, attempt: int) -> list[Create]:
    """Recreate a claim that was deleted before a pod used it."""
    gone = run.wanted.own_claim and run.claim is None
    return [Create(claim) for claim in _missing_prerequisite(run, attempt, "PersistentVolumeClaim")] if gone else []


def lost_lease(run: RunSnapshot, attempt: int) -> list[Apply]:
    """Recreate the Lease, which the orchestrator may renew but not create. A refusal does not stop the other writes."""
    made = _missing_prerequisite(run, attempt, "Lease") if run.observed.lease is None else []
    return [Apply(lease, expect_absent=True, repairs=True) for lease in made]


def delete_stale_pods(run: RunSnapshot, attempt: int) -> list[Delete]:
    """Delete pods of an older attempt that appeared late: a controller may act on an outdated cache."""
    return [Delete(pod.ref, pod.uid) for pod in run.group if pod.attempt < attempt and pod.deleted_at is None]


def _lost_deployment(run: RunSnapshot, in_hand: bool) -> list[Apply]:
    """Recreate a deleted Deployment within the attempt: engines never fail a run."""
    if in_hand or run.spec is None or run.forbidden or not run.serves or run.deployment is not None:
        return []
    made = render.render_workloads(run.context(run.spec, run.past.attempt)).inference
    return [] if made is None else [Apply(made, expect_absent=True)]


def _edited_budget(run: RunSnapshot, begins: bool) -> list[Apply]:
    """Apply the eviction budget after an edit of `inference`, until the edit is recorded."""
    if begins or run.spec is None or not run.serves or run.generation == run.past.observed_generation:
        return []
    context = run.context(run.spec, run.past.attempt)
    if not render.has_engines_to_keep(context):
        return []
    return parts.apply_parts(run, [render.eviction_budget(context)])


def _moved_access(run: RunSnapshot, attempt: int, begins: bool) -> list[Apply]:
    """Apply the network policy for the API server's new addresses, so that the orchestrator can renew its Lease."""
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
