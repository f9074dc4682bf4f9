"""Messages about refused writes and about the run's claim, each with the fix.

Writes are refused by ResourceQuotas, LimitRanges, missing rights, webhooks and policies. Condition StorageReady reports the state of the
run's PersistentVolumeClaim, and the fix if it gets no volume.
"""

from __future__ import annotations

import re

from rlrun.runtime.printable import shorten_text
from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons, wait_facts
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.status.scheduling import waits_for_claim
from rlrun_operator.status.wait_facts import TEXT_MAX, Scene
from rlrun_operator.times import seconds_of

_RANGE = re.compile(
    r"(minimum|maximum) \S+ usage per \w+ is|max limit to request ratio per \w+ is|must be less than or equal to \S+ limit of"
)
_RIGHT = re.compile(r'User "[^"]*" cannot \w+ resource|is attempting to grant RBAC permissions not currently held')
_FREE = "free some of the namespace's quota, or have it raised"
_WEBHOOK_FAILED = re.compile(r"failed calling webhook|did not complete within requested timeout")
_FIXED = re.compile(
    r"field is immutable|cannot change roleRef|may not change once set|updates to \S+ spec for fields other than"
)
_FILLED_IN = re.compile(
    r"(containers|initContainers)\[(\d+)\]\.resources\.requests: .*?must be less than or equal to (\S+) limit"
)


def limit_refusal(what: str, text: str, place: str, *, noun: str = "it") -> ConditionUpdate | None:
    """Return the condition for a refusal by a ResourceQuota or a LimitRange, or None for any other refusal.

    Args:
        what: role or object that cannot be created; the message starts with it.
        text: message of the API server.
        place: field of the manifest whose value is too large or missing.
        noun: name of the refused object within the sentence.
    """
    if "exceeded quota" in text:
        return ConditionUpdate(
            "False", reasons.QUOTA_EXCEEDED, f"{what}: the quota does not allow {noun}: {text}; {_FREE}"
        )
    if "failed quota" in text:
        name = f"set the resources it names in {place}, or add a LimitRange with defaults to the namespace"
        return ConditionUpdate(
            "False", reasons.QUOTA_EXCEEDED, f"{what}: a quota limits a resource that is not set: {text}; {name}"
        )
    if (of_range := range_fix(text, place)) is not None:
        return ConditionUpdate(
            "False", reasons.PODS_REFUSED, f"{what}: a LimitRange does not allow {noun}: {text}; {of_range}"
        )
    return None


def range_fix(text: str, place: str) -> str | None:
    """Return the fix for a refusal by a LimitRange, or None for any other refusal; arguments as in `limit_refusal`."""
    return f"change {place}, or have the namespace's LimitRange changed" if _RANGE.search(text) else None


def kept_out(what: str, text: str, place: str) -> ConditionUpdate:
    """Return the condition for any refused write of the operator itself; arguments as in `limit_refusal`."""
    return limit_refusal(what, text, place) or ConditionUpdate(
        "False", reasons.ADMISSION_REFUSED, f"{what}: {text}; {refusal_fix(text)}"
    )


def refusal_fix(text: str) -> str:
    """Return the fix for a refused write; `limit_refusal` has more precise fixes for quotas and LimitRanges."""
    if "exceeded quota" in text:
        return f"{_FREE}; the operator retries"
    if _RIGHT.search(text):
        return "the operator's Role lacks this right: a helm upgrade of its chart grants it; the operator retries"
    if _WEBHOOK_FAILED.search(text):
        return "repair that webhook, or remove its configuration; the operator retries"
    if _FIXED.search(text):
        return "another client created or locked this object: delete it, and the operator creates it again"
    return "change the policy or webhook that refuses it; the operator retries"


def is_fixed(text: str) -> bool:
    """Return whether a write failed because the object's fields are immutable: the object must be deleted first."""
    return bool(_FIXED.search(text))


def limit_was_filled_in(message: str, pod: Manifest) -> bool:
    """Return whether a Pod was refused because a LimitRange added a default limit below the Pod's own request."""
    found = _FILLED_IN.search(message)
    if found is None or pod.get("kind") != "Pod":
        return False
    group, index, resource = found.group(1), int(found.group(2)), found.group(3)
    containers = (pod.get("spec") or {}).get(group) or []
    limits = (containers[index].get("resources") or {}).get("limits") or {} if index < len(containers) else {}
    return resource not in limits


_REFUSED = "FailedCreate"
_ACCESS_MODES = re.compile(r"access ?modes?\b|MULTI_NODE|multi.?writer|ReadWriteMany", re.IGNORECASE)
"""Error texts of storage drivers whose volumes attach to one node only: local-path (kind), EBS, PD."""


def storage_condition(scene: Scene, patient: bool) -> ConditionUpdate:
    """Return StorageReady. `patient`: a healthy start may still take this long, so the function reports no problem yet."""
    name, claim = scene.wanted.claim, scene.claim
    if claim is None:
        return _missing_claim(scene, patient)
    state = (claim.get("status") or {}).get("phase")
    if state == "Bound":
        return scene.trouble or ConditionUpdate(
            "True", reasons.CLAIM_BOUND, f"claim {name} is bound{_earlier_claim_note(scene, claim)}"
        )
    if state == "Lost":
        return ConditionUpdate(
            "False", reasons.CLAIM_LOST, f"claim {name} has lost its volume; restore the volume, or use another claim"
        )
    of_class = (claim.get("spec") or {}).get("storageClassName")
    event = wait_facts.newest_event(scene.events, "PersistentVolumeClaim", name, uid=claim["metadata"].get("uid"))
    event_text = shorten_text(str(event.get("message")), TEXT_MAX) if event else ""
    outdated = _explain_outdated(scene, claim)
    if (event_text or outdated or waits_for_claim(scene.pods)) and not patient:
        return ConditionUpdate("False", reasons.CLAIM_PENDING, _unbound_message(scene, claim, event_text, outdated))
    named = f" (StorageClass {of_class})" if of_class else ""
    return ConditionUpdate("False", reasons.CLAIM_WAITING, f"claim {name}{named} waits for its volume")


def _missing_claim(scene: Scene, patient: bool) -> ConditionUpdate:
    """Return StorageReady of a run whose claim does not exist."""
    name = scene.wanted.claim
    refused = wait_facts.newest_event(scene.events, "PersistentVolumeClaim", name, reason=_REFUSED)
    if refused is not None:
        text = shorten_text(str(refused.get("message")), TEXT_MAX)
        return kept_out(f"claim {name} cannot be created", text, "storage.claimTemplate.size")
    if scene.wanted.own_claim or patient:
        return ConditionUpdate("False", reasons.CLAIM_WAITING, f"claim {name} is being created")
    fix = "create it in the run's namespace, or correct storage.claimName"
    return ConditionUpdate(
        "False", reasons.CLAIM_NOT_FOUND, f"storage.claimName: PersistentVolumeClaim {name} does not exist; {fix}"
    )


def _unbound_message(scene: Scene, claim: Manifest, event_text: str, outdated: str) -> str:
    """Return the message for a claim without a volume: its cause, then the fix."""
    name, spec = scene.wanted.claim, claim.get("spec") or {}
    of_class = spec.get("storageClassName")
    head = f"claim {name} of StorageClass {of_class} is not bound"
    if not of_class:
        head = f"claim {name} names no StorageClass and is not bound"
    head = f"{head}: {event_text or 'no provisioner creates a volume for it'}"
    if not scene.wanted.own_claim:
        return f"{head}; repair the claim, or name another one in storage.claimName"
    delete = f"kubectl -n {scene.namespace} delete pvc {name}"
    if outdated:
        return f"{head}; {outdated}: run {delete}, and the operator creates it again from storage.claimTemplate"
    if _ACCESS_MODES.search(event_text) and "ReadWriteMany" in (spec.get("accessModes") or ()):
        fix = (
            "name a StorageClass whose volumes many nodes can mount in storage.claimTemplate.storageClassName, or set "
            "storage.claimTemplate.accessModes to [ReadWriteOnce], which puts all pods on one node"
        )
    elif of_class:
        fix = "correct storage.claimTemplate.storageClassName (kubectl get storageclass lists them)"
    else:
        fix = "set storage.claimTemplate.storageClassName, or give the cluster a default StorageClass"
    return f"{head}; {fix}; then run {delete}: the operator creates it again"


def _explain_outdated(scene: Scene, claim: Manifest) -> str:
    """Return why an unbound claim of the run's name does not match the specification, or an empty string if it does."""
    if not scene.wanted.own_claim or scene.template is None:
        return ""
    if _is_older(scene, claim):
        return "an earlier run of this name left this claim"
    spec, template = claim.get("spec") or {}, scene.template
    other_class = template.storage_class_name not in (None, spec.get("storageClassName"))
    other_modes = sorted(spec.get("accessModes") or template.access_modes) != sorted(template.access_modes)
    return "it was created before storage.claimTemplate was edited" if other_class or other_modes else ""


def _earlier_claim_note(scene: Scene, claim: Manifest) -> str:
    """Return an addition to the message if the bound claim was left by an earlier run of this name."""
    if not scene.wanted.own_claim or not _is_older(scene, claim):
        return ""
    delete = f"kubectl -n {scene.namespace} delete pvc {scene.wanted.claim}"
    return f"; an earlier run of this name left it with its data, and `{delete}` removes both"


def _is_older(scene: Scene, claim: Manifest) -> bool:
    created = seconds_of(claim["metadata"].get("creationTimestamp"))
    return created is not None and scene.born is not None and created < scene.born
