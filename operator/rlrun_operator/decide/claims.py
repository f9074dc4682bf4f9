"""Claim of a run: its owner, its growth, reports on its volume, and its deletion.

The run owns its own claim until the claim is bound. After that the claim has no owner, unless `storage.whenDeleted` is Delete.

A larger `storage.claimTemplate.size` is requested at once. Attempts continue, because Kubernetes enlarges the volume under running pods. A
claim never shrinks, and a claim that was not created for a run of this name is not changed. A refusal (a StorageClass without expansion, a
quota) is reported and retried later, and the run continues.

Reports on the volume come from the roles, because the operator mounts no volume.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.api.kubernetes_types import read_amount
from rlrun.api.run_status import StorageStatus
from rlrun.runtime.printable import shorten_text
from rlrun_operator.decide.reading import is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures.detect import Cause
from rlrun_operator.state import Disown, Grow, Manifest
from rlrun_operator.status import claim_messages, reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition
from rlrun_operator.status.run_progress import Report


def disown_claim(run: RunSnapshot) -> Disown | None:
    """Return the write that removes the run from the owners of a bound claim; None if it has no owner, or is deleted with the run."""
    claim, spec = run.claim, run.spec
    if claim is None or spec is None or not run.wanted.own_claim or is_ending(claim):
        return None
    # Until it is bound, the claim is deleted with the run, because it contains nothing. After that it
    # outlives the run, so that no checkpoint is lost with an object.
    owners = claim["metadata"].get("ownerReferences") or ()
    others = tuple(owner for owner in owners if owner.get("uid") != run.metadata["uid"])
    is_bound = (claim.get("status") or {}).get("phase") == "Bound"
    if not is_bound or len(others) == len(owners) or spec.storage.when_deleted == "Delete":
        return None
    return Disown(run.wanted.claim, uid_of(claim), claim["metadata"].get("resourceVersion"), others)


RETRY_SECONDS, LONGEST_RETRY_SECONDS = 60.0, 600.0
"""First and longest pause between two tries of a refused growth; the pause doubles each time."""
_TEXT_MAX = 600
_FAILURES = ("ControllerResizeError", "NodeResizeError")
_ON_NODE = "FileSystemResizePending"


def wanted_growth(run: RunSnapshot) -> Grow | None:
    """Return the growth to request in this pass; None if the claim is large enough, or if the growth was refused recently."""
    grow = _missing_growth(run)
    return None if grow is None or _growth_refusal(run, grow) is not None else grow


def with_growth_condition(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Return `updates` with the state of a growth in StorageReady while it is refused or in progress."""
    kind, claim = reasons.STORAGE_READY, _own_claim(run)
    past = find_condition(run.past.conditions, kind)
    now = (
        updates.get(kind)
        if kind in updates
        else ConditionUpdate(past.status, past.reason, past.message)
        if past is not None
        else None
    )
    # The growth is an addition to StorageReady, not a state of its own: the run continues during it.
    if claim is None or now is None:
        return updates
    told = _growth_update(run, claim)
    if now.status == "True" and (told is not None or now.reason != reasons.CLAIM_BOUND):
        bound = ConditionUpdate("True", reasons.CLAIM_BOUND, f"claim {run.wanted.claim} is bound")
        return {**updates, kind: bound if told is None else told._replace(message=f"{bound.message}; {told.message}")}
    if told is not None and kind in updates and now.reason in reasons.VOLUME:
        return {**updates, kind: now._replace(message=f"{now.message}; {told.message}")}
    return updates


def with_claim_size(run: RunSnapshot, storage: StorageStatus | None) -> StorageStatus | None:
    """Return `storage` with the requested size of the claim."""
    if storage is None or run.claim is None:
        return storage
    return StorageStatus(
        claim_name=storage.claim_name,
        path=storage.path,
        volume_name=storage.volume_name,
        size=_requested_size(run.claim),
    )


def _own_claim(run: RunSnapshot) -> Manifest | None:
    """Return the bound claim of a started run, made for a run of this name and not being deleted: only such a claim can grow."""
    claim = run.claim
    if (
        claim is None
        or not run.wanted.own_claim
        or not run.is_made_for_run(claim)
        or is_ending(claim)
        or not run.past.attempt
    ):
        return None
    return claim if (claim.get("status") or {}).get("phase") == "Bound" else None


def _missing_growth(run: RunSnapshot) -> Grow | None:
    """Return the growth from the requested size of the claim to the specified size."""
    claim = _own_claim(run)
    template = run.spec.storage.template if run.spec is not None and not run.forbidden_fields else None
    if claim is None or template is None or not _is_less(_requested_size(claim), template.size):
        return None
    return Grow(run.wanted.claim, uid_of(claim), claim["metadata"].get("resourceVersion"), template.size)


def _growth_refusal(run: RunSnapshot, grow: Grow) -> str | None:
    """Return the API server's message if it refused this growth recently."""
    refused = run.observed.growth_refusal
    if refused is None or refused.grow is None:
        return None
    return refused.text if refused.grow.target == grow.target else None


def _growth_update(run: RunSnapshot, claim: Manifest) -> ConditionUpdate | None:
    """Return status, reason and addition to the message of StorageReady for a bound claim."""
    grow, asked, holds = (
        _missing_growth(run),
        _requested_size(claim),
        _storage_amount((claim.get("status") or {}).get("capacity")),
    )
    if grow is not None and (text := _growth_refusal(run, grow)) is not None:
        kept = f"it stays at {holds or asked}, and the run continues"
        what = f"storage.claimTemplate.size requests {grow.size}, which is refused: {shorten_text(text, _TEXT_MAX)}"
        return ConditionUpdate("True", reasons.CLAIM_RESIZE_REFUSED, f"{kept}; {what}; {_growth_fix(claim, text)}")
    target = asked if grow is None else grow.size
    if not _is_less(holds or asked, target):
        return None
    return ConditionUpdate(
        "True", reasons.CLAIM_RESIZING, f"it grows from {holds or asked} to {target}{_growth_stage(claim)}"
    )


def _growth_fix(claim: Manifest, text: str) -> str:
    if "storageclass" in text.lower():
        of_class = (claim.get("spec") or {}).get("storageClassName") or "of the claim"
        return f"have allowVolumeExpansion set in StorageClass {of_class}, or set the size back; it is tried again"
    return claim_messages.range_fix(text, "storage.claimTemplate.size") or claim_messages.refusal_fix(text)


def _growth_stage(claim: Manifest) -> str:
    """Return the stage of the volume's growth, or the message of the component that fails to enlarge it."""
    conditions = [c for c in (claim.get("status") or {}).get("conditions") or () if c.get("status") == "True"]
    for condition in conditions:
        if condition.get("type") in _FAILURES:
            return f": {shorten_text(str(condition.get('message')), _TEXT_MAX)}; it is tried again"
    if any(condition.get("type") == _ON_NODE for condition in conditions):
        return ": the volume is enlarged; its file system follows on the node of a pod that mounts it"
    return ": the storage driver enlarges the volume"


def _requested_size(claim: Manifest) -> str | None:
    return _storage_amount(((claim.get("spec") or {}).get("resources") or {}).get("requests"))


def _storage_amount(of: Manifest | None) -> str | None:
    found = (of or {}).get("storage")
    return str(found) if found is not None else None


def _is_less(one: str | None, other: str | None) -> bool:
    """Return whether one quantity is less than the other; False if one of them is not readable."""
    try:
        return one is not None and other is not None and read_amount(one) < read_amount(other)
    except ValueError:
        return False


_FIXES = {
    reasons.STORAGE_FULL: "make space on it, or enlarge the claim",
    reasons.STORAGE_READ_ONLY: "look at the node's kernel log and at the storage, and make it writable again",
    reasons.STORAGE_FAILING: "look at the storage and the way to it",
    reasons.STORAGE_SLOW: "look at the storage and the way to it",
}


def storage_condition(report: Report | None, claim: str) -> ConditionUpdate | None:
    """Return StorageReady while the volume of `claim` is unusable, otherwise None."""
    if report is None or report.storage is None:
        return None
    reason, text = report.storage
    return ConditionUpdate("False", reason, f"claim {claim}: {text}; {_FIXES[reason]}: the run continues by itself")


def checkpoint_condition(report: Report) -> ConditionUpdate | None:
    """Return CheckpointHealthy while the volume is unusable: it names the steps that a restart would lose."""
    if report.storage is None:
        return None
    reason, text = report.storage
    base = report.checkpoint_step or 0
    lost = (report.step or 0) - base
    steps = "no step" if not lost else "one step" if lost == 1 else f"{lost} steps"
    since = f"step {base}" if base else "the beginning"
    return ConditionUpdate("False", reason, f"{text}; a restart now would lose {steps}, those since {since}")


def ending_claim_cause(run: RunSnapshot) -> Cause | None:
    """Return the cause that ends an attempt on a claim that is being deleted: scheduled pods keep the claim, and others never get it."""
    pods = run.needed_pods(run.past.attempt)
    # Engines that run keep the old claim alive. Only a pod that waits for a node shows that the attempt
    # cannot be complete.
    serves = any(pod.role == "inference" and pod.node is not None for pod in pods)
    waiting = [pod for pod in pods if pod.node is None and not (serves and pod.role == "inference")]
    if not waiting or not run.claim_is_ending:
        return None
    pod, told = waiting[0], f"claim {run.wanted.claim} is being deleted, and takes no other pod"
    return Cause("disruption", None, pod.role, pod.name, None, None, reasons.CLAIM_DELETED, told)
