"""Growth of the run's own claim: it follows `storage.claimTemplate.size` upwards at once, and no attempt begins or ends for it.

A claim is never made smaller, and one that no run of this name made is left alone. Kubernetes enlarges the volume below running pods. What
it refuses (a StorageClass that does not let volumes grow, a quota) is reported, tried again later, and harms nothing: the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.api.kubernetes import amount
from rlrun.api.status import StorageStatus
from rlrun.defaults.words import shorten
from rlrun_operator.decide.reading.children import is_ending, uid_of
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.state import Grow, Manifest
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import Say, find

RETRY_SECONDS, LONGEST_RETRY_SECONDS = 60.0, 600.0
"""Pauses between two tries of a growth that was refused: at first, doubled each time, and at most."""
_TEXT_MAX = 600
_FAILURES = ("ControllerResizeError", "NodeResizeError")
_ON_NODE = "FileSystemResizePending"


def wanted(case: Case) -> Grow | None:
    """Growth to request from the API server in this pass; None: none is missing, or it was refused a while ago."""
    grow = _missing(case)
    return None if grow is None or _refusal(case, grow) is not None else grow


def noted(case: Case, said: Mapping[str, Say | None]) -> Mapping[str, Say | None]:
    """`said` with what StorageReady has to say of a growth while it is refused or under way."""
    kind, claim = reasons.STORAGE_READY, _own_claim(case)
    past = find(case.past.conditions, kind)
    now = said.get(kind) if kind in said else Say(past.status, past.reason, past.message) if past is not None else None
    if claim is None or now is None:
        return said
    told = _told(case, claim)
    if now.status == "True" and (told is not None or now.reason != reasons.CLAIM_BOUND):
        bound = Say("True", reasons.CLAIM_BOUND, f"claim {case.wanted.claim} is bound")
        return {**said, kind: bound if told is None else told._replace(message=f"{bound.message}; {told.message}")}
    if told is not None and kind in said and now.reason in reasons.VOLUME:
        return {**said, kind: now._replace(message=f"{now.message}; {told.message}")}
    return said


def sized(case: Case, storage: StorageStatus | None) -> StorageStatus | None:
    """`storage` with what the claim asks for."""
    if storage is None or case.claim is None:
        return storage
    return StorageStatus(
        claim_name=storage.claim_name, path=storage.path, volume_name=storage.volume_name, size=_asked(case.claim)
    )


def _own_claim(case: Case) -> Manifest | None:
    """The claim of a run that has begun, if it is bound, stays, and was made by a run of this name: no other one can grow."""
    claim = case.claim
    if claim is None or not case.wanted.own_claim or not case.made(claim) or is_ending(claim) or not case.past.attempt:
        return None
    return claim if (claim.get("status") or {}).get("phase") == "Bound" else None


def _missing(case: Case) -> Grow | None:
    """The growth from what the claim asks for to what is specified."""
    claim = _own_claim(case)
    template = case.spec.storage.template if case.spec is not None and not case.forbidden else None
    if claim is None or template is None or not _is_less(_asked(claim), template.size):
        return None
    return Grow(case.wanted.claim, uid_of(claim), claim["metadata"].get("resourceVersion"), template.size)


def _refusal(case: Case, grow: Grow) -> str | None:
    """Words of the API server where it refused this growth a while ago."""
    refused = case.observed.ungrown
    same = refused is not None and (refused.grow.uid, refused.grow.size) == (grow.uid, grow.size)
    return refused.text if refused is not None and same else None


def _told(case: Case, claim: Manifest) -> Say | None:
    """Status of a bound claim's StorageReady, its reason, and the words that follow those of the binding."""
    grow, asked, holds = _missing(case), _asked(claim), _amount((claim.get("status") or {}).get("capacity"))
    if grow is not None and (text := _refusal(case, grow)) is not None:
        kept = f"it stays at {holds or asked}, and the run goes on"
        what = f"storage.claimTemplate.size asks for {grow.size}, which is refused: {shorten(text, _TEXT_MAX)}"
        return Say("True", reasons.CLAIM_RESIZE_REFUSED, f"{kept}; {what}; {_fix(claim, text)}")
    target = asked if grow is None else grow.size
    if not _is_less(holds or asked, target):
        return None
    return Say("True", reasons.CLAIM_RESIZING, f"it grows from {holds or asked} to {target}{_stage(claim)}")


def _fix(claim: Manifest, text: str) -> str:
    if "storageclass" in text.lower():
        of_class = (claim.get("spec") or {}).get("storageClassName") or "of the claim"
        return f"have allowVolumeExpansion set in StorageClass {of_class}, or set the size back; it is tried again"
    return admission_limits.range_fix(text, "storage.claimTemplate.size") or admission_limits.fix(text)


def _stage(claim: Manifest) -> str:
    """Stage of the volume's growth; where that fails, the words of the component that enlarges it."""
    conditions = [c for c in (claim.get("status") or {}).get("conditions") or () if c.get("status") == "True"]
    for condition in conditions:
        if condition.get("type") in _FAILURES:
            return f": {shorten(str(condition.get('message')), _TEXT_MAX)}; it is tried again"
    if any(condition.get("type") == _ON_NODE for condition in conditions):
        return ": the volume is enlarged; its file system follows on the node of a pod that mounts it"
    return ": the storage driver enlarges the volume"


def _asked(claim: Manifest) -> str | None:
    return _amount(((claim.get("spec") or {}).get("resources") or {}).get("requests"))


def _amount(of: Manifest | None) -> str | None:
    found = (of or {}).get("storage")
    return str(found) if found is not None else None


def _is_less(one: str | None, other: str | None) -> bool:
    """True if one quantity is less than the other; not where either cannot be read."""
    try:
        return one is not None and other is not None and amount(one) < amount(other)
    except ValueError:
        return False
