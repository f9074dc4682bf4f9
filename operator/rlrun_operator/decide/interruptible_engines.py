"""Engines on interruptible nodes (`inference.spot`): a second Deployment that no decision waits for.

Their loss does not end an attempt: other engines get their requests, and their Deployment recreates them when nodes are available. An
attempt is complete without them, they need no admission by the operator's queue, and `inference.spot` may change during an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.api.run_status import InferenceStatus, SpotStatus
from rlrun_operator import render
from rlrun_operator.decide.reading import desired_replicas, is_ending, is_refused, rendering_of, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.workload_edits import lost_fields
from rlrun_operator.names import RENDERING_ANNOTATION, SPOT_NODES_ANNOTATION
from rlrun_operator.pods import Pod
from rlrun_operator.state import Apply, Delete, Manifest
from rlrun_operator.status.conditions import NO_CHANGE, StatusChange

GOES_ON = "the run continues more slowly"
SHOWN = 3
"""Maximum number of labels in a message."""


def apply_spot_engines(run: RunSnapshot, attempt: int, *, begins: bool) -> list[Apply]:
    """Return the writes that create or update the Deployment of the spot engines.

    Within an attempt, only changes of `inference.spot` are applied. Other edits wait for the next attempt, so that an orchestrator uses
    engines of one specification.
    """
    spec, there = run.spec, run.spot_deployment
    if (
        spec is None
        or spec.inference.spot is None
        or not run.has_own_engines
        or run.forbidden_fields
        or run.taken is not None
    ):
        return []
    if there is not None and is_ending(there):
        return []
    if not begins and (run.spec_hash != run.past.spec_hash or (there is not None and not _has_moved(run, there))):
        return []
    made = render.spot_deployment(run.context(spec, attempt))
    if made is None or (there is not None and begins and _is_as(run, there, made)):
        return []
    version = there["metadata"].get("resourceVersion") if there is not None else None
    return [Apply(made, expect_absent=there is None, replaces=version)]


def _has_moved(run: RunSnapshot, there: Manifest) -> bool:
    """Return whether `inference.spot` selects other nodes than those of the Deployment."""
    assert run.spec is not None
    assert run.spec.inference.spot is not None
    found = (there["metadata"].get("annotations") or {}).get(SPOT_NODES_ANNOTATION)
    return bool(found != render.spot_nodes(run.spec.inference.spot))


def _is_as(run: RunSnapshot, there: Manifest, made: Manifest) -> bool:
    rendering = made["metadata"]["annotations"][RENDERING_ANNOTATION]
    same = run.hash_of(there) == run.spec_hash and rendering_of(there) == rendering
    return same and not lost_fields(there, made)


def remove_spot_engines(run: RunSnapshot) -> list[Delete]:
    """Delete the Deployment after `inference.spot` was removed and its engines are drained."""
    there = run.spot_deployment
    # The Deployment is deleted only at size 0, which it reaches after its engines are drained.
    unwanted = run.spec is not None and run.spec.inference.spot is None
    if there is None or is_ending(there) or not unwanted or desired_replicas(there):
        return []
    return [Delete(run.spot_ref, uid_of(there))]


def with_spot_status(run: RunSnapshot, change: StatusChange, *, renewed: bool) -> StatusChange:
    """Return `status.inference` of `change` with the spot engines and their losses.

    Args:
        run: snapshot of the run.
        change: change of the status with the current numbers.
        renewed: whether this pass applies their Deployment, which replaces the existing engines.
    """
    found: InferenceStatus | None = change.values().get("inference")
    if found is None or found.spot is None:
        return NO_CHANGE
    spot, live = found.spot, {pod.name: pod for pod in run.pods if pod.spot}
    past = run.past.inference.spot or SpotStatus()
    known = past.pods or []
    # The recorded names of ready pods are the memory of losses: a pod that disappears between two passes
    # leaves no other trace.
    kept = [name for name in known if name in live and _stays_in_use(live[name])]
    lost = _interrupted_pods(
        [name for name in known if name not in kept], live, wanted_gone=max(0, len(known) - spot.desired)
    )
    come = [pod.name for pod in live.values() if pod.ready and _stays_in_use(pod) and pod.name not in kept]
    update: dict[str, object] = {"pods": sorted([] if renewed else [*kept, *come]) or None}
    if lost:
        seen = {pod.name: pod for pod in run.gone_spot} | live
        update |= {"lost": past.lost + len(lost), "last_loss": _interruption_cause(lost[-1], seen.get(lost[-1]))}
    return StatusChange(inference=found.model_copy(update={"spot": spot.model_copy(update=update)}))


def _stays_in_use(pod: Pod) -> bool:
    return pod.deleted_at is None and pod.disruption is None and pod.phase not in ("Failed", "Succeeded")


def _interrupted_pods(gone: Sequence[str], live: dict[str, Pod], *, wanted_gone: int) -> list[str]:
    """Return the pods that were lost. The first `wanted_gone` removed pods are left out, preferably those without a known cause."""
    ordered = sorted(gone, key=lambda name: (name in live and live[name].disruption is not None, name))
    return ordered[wanted_gone:]


def _interruption_cause(name: str, pod: Pod | None) -> str:
    if pod is None:
        return f"pod {name} is gone"
    where = f"pod {name}" + (f" on node {pod.node}" if pod.node else "")
    if pod.disruption is not None:
        reason, message = pod.disruption
        return f"{where}: {reason}: {message}" if message else f"{where}: {reason}"
    return f"{where}: {pod.reason}: {pod.message}" if pod.reason else f"{where} was deleted"


def describe_missing_engines(run: RunSnapshot) -> str:
    """Return the missing spot engines with the reason, as the end of a sentence; empty if all are ready."""
    wanted, pods = run.wanted.spot, [pod for pod in run.pods if pod.spot and pod.deleted_at is None]
    lacks = wanted - sum(1 for pod in pods if pod.ready)
    if lacks <= 0:
        return ""
    unplaced = sum(1 for pod in pods if pod.node is None)
    if unplaced:
        return f"{unplaced} of {wanted} spot engines find no node with {_spot_labels(run)}: {GOES_ON}"
    if is_refused(run.spot_deployment):
        return f"{lacks} of {wanted} spot engines may not be made (quota or admission of the namespace): {GOES_ON}"
    return f"{lacks} of {wanted} spot engines are not ready: {GOES_ON}"


def _spot_labels(run: RunSnapshot) -> str:
    block = run.spec.inference.spot if run.spec is not None else None
    found = [f"{key}={value}" for key, value in sorted(block.node_selector.items())] if block is not None else []
    return ", ".join(found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
