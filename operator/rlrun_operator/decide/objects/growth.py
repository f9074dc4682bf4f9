"""Growth of the run's own claim: a larger `storage.claimTemplate.size` is requested at once, and attempts continue.

A claim never shrinks, and a claim that no run of this name created is not changed. Kubernetes enlarges the volume under running pods. A
refusal (a StorageClass without expansion, a quota) is reported and retried later, and the run continues.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.api.kubernetes import read_amount
from rlrun.api.status import StorageStatus
from rlrun.defaults.words import shorten_text
from rlrun_operator.decide.reading.children import is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.state import Grow, Manifest
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition

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
    template = run.spec.storage.template if run.spec is not None and not run.forbidden else None
    if claim is None or template is None or not _is_less(_requested_size(claim), template.size):
        return None
    return Grow(run.wanted.claim, uid_of(claim), claim["metadata"].get("resourceVersion"), template.size)


def _growth_refusal(run: RunSnapshot, grow: Grow) -> str | None:
    """Return the API server's message if it refused this growth recently."""
    refused = run.observed.ungrown
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
    return admission_limits.range_fix(text, "storage.claimTemplate.size") or admission_limits.refusal_fix(text)


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
