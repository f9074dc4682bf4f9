"""Engines on interruptible nodes (`inference.spot`): a Deployment of their own beside the run's, which no decision waits for.

Their loss ends no attempt: their requests are asked of other engines, and their Deployment makes them again once there is a node. So an
attempt is whole without them, they need no admission by the operator's queue, and all of `inference.spot` may change while one runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.api.status import InferenceStatus, SpotStatus
from rlrun_operator import render
from rlrun_operator.decide.objects.workload_edits import lost_fields
from rlrun_operator.decide.reading.children import desired_replicas, is_ending, is_refused, rendering_of, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import RENDERING_ANNOTATION, SPOT_NODES_ANNOTATION
from rlrun_operator.pods import Pod
from rlrun_operator.state import Apply, Delete, Manifest
from rlrun_operator.status.change import NO_CHANGE, StatusChange

GOES_ON = "the run goes on without, slower"
SHOWN = 3
"""Labels that a message names."""


def apply_spot_engines(run: RunSnapshot, attempt: int, *, begins: bool) -> list[Apply]:
    """Writes that make or renew the Deployment of the spot engines.

    Within an attempt only what `inference.spot` itself says is renewed: all else is of the attempt. One that was edited otherwise waits for
    the next attempt, so that an orchestrator meets engines of one specification.
    """
    spec, there = run.spec, run.spot_deployment
    if spec is None or spec.inference.spot is None or not run.serves or run.forbidden or run.taken is not None:
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
    """True if `inference.spot` names other nodes than the Deployment was made for."""
    assert run.spec is not None
    assert run.spec.inference.spot is not None
    found = (there["metadata"].get("annotations") or {}).get(SPOT_NODES_ANNOTATION)
    return bool(found != render.spot_nodes(run.spec.inference.spot))


def _is_as(run: RunSnapshot, there: Manifest, made: Manifest) -> bool:
    rendering = made["metadata"]["annotations"][RENDERING_ANNOTATION]
    same = run.hash_of(there) == run.spec_hash and rendering_of(there) == rendering
    return same and not lost_fields(there, made)


def remove_spot_engines(run: RunSnapshot) -> list[Delete]:
    """The Deployment after `inference.spot` was removed, once no engine of it is in use."""
    there = run.spot_deployment
    unwanted = run.spec is not None and run.spec.inference.spot is None
    if there is None or is_ending(there) or not unwanted or desired_replicas(there):
        return []
    return [Delete(run.spot_ref, uid_of(there))]


def with_spot_status(run: RunSnapshot, change: StatusChange, *, renewed: bool) -> StatusChange:
    """`status.inference` of `change` with what has become of the spot engines.

    Args:
        run: snapshot of the run.
        change: with the present numbers.
        renewed: their Deployment is made anew in this pass, which ends those that there are.
    """
    found: InferenceStatus | None = change.values().get("inference")
    if found is None or found.spot is None:
        return NO_CHANGE
    spot, live = found.spot, {pod.name: pod for pod in run.pods if pod.spot}
    past = run.past.inference.spot or SpotStatus()
    known = past.pods or []
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
    """Pods that were taken from the run; of those that went, as many as were to go are left out, those without a known cause first."""
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
    """Spot engines that are not ready, and why, as the end of a sentence; empty: all are."""
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
