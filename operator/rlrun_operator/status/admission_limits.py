"""Messages and fixes for writes that admission refuses: ResourceQuotas, LimitRanges, rights, webhooks and policies."""

from __future__ import annotations

import re

from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate

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
