"""Words for what admission refuses, with the fix. Those of ResourceQuotas name the quota, what is asked, used and limited."""

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
_UNASKED = re.compile(r"failed calling webhook|did not complete within requested timeout")
_FIXED = re.compile(
    r"field is immutable|cannot change roleRef|may not change once set|updates to \S+ spec for fields other than"
)
_FILLED_IN = re.compile(
    r"(containers|initContainers)\[(\d+)\]\.resources\.requests: .*?must be less than or equal to (\S+) limit"
)


def limit_refusal(what: str, text: str, place: str, *, noun: str = "it") -> ConditionUpdate | None:
    """A refusal by a quota or a LimitRange; None: it is neither.

    Args:
        what: that is not made.
        text: of the refusal.
        place: field of the manifest by which less is asked for.
        noun: what is not allowed.
    """
    if "exceeded quota" in text:
        return ConditionUpdate(
            "False", reasons.QUOTA_EXCEEDED, f"{what}: the quota does not allow {noun}: {text}; {_FREE}"
        )
    if "failed quota" in text:
        name = f"set what it names in {place}, or have a LimitRange with defaults made for the namespace"
        return ConditionUpdate(
            "False", reasons.QUOTA_EXCEEDED, f"{what}: a quota counts what is not set: {text}; {name}"
        )
    if (of_range := range_fix(text, place)) is not None:
        return ConditionUpdate(
            "False", reasons.PODS_REFUSED, f"{what}: a LimitRange does not allow {noun}: {text}; {of_range}"
        )
    return None


def range_fix(text: str, place: str) -> str | None:
    """Fix of what a LimitRange refuses; None: another one refuses. `place`: as of `limit_refusal`."""
    return f"change {place}, or have the namespace's LimitRange changed" if _RANGE.search(text) else None


def kept_out(what: str, text: str, place: str) -> ConditionUpdate:
    """A refusal by any admission of what the operator itself makes; arguments as of `limit_refusal`."""
    return limit_refusal(what, text, place) or ConditionUpdate(
        "False", reasons.ADMISSION_REFUSED, f"{what}: {text}; {refusal_fix(text)}"
    )


def refusal_fix(text: str) -> str:
    """Fix of a refused write; `limit_refusal` has more precise ones of quotas and LimitRanges."""
    if "exceeded quota" in text:
        return f"{_FREE}; it is tried again"
    if _RIGHT.search(text):
        return "the operator's Role lacks this right: a helm upgrade of its chart grants it; it is tried again"
    if _UNASKED.search(text):
        return "have that webhook answer, or its configuration removed; it is tried again"
    if _FIXED.search(text):
        return "somebody else has made or locked it: delete it, and it is made again as the run needs it"
    return "it is tried again until whoever refuses it allows it"


def is_fixed(text: str) -> bool:
    """True if what exists can only be deleted: Kubernetes lets nobody change these fields of it."""
    return bool(_FIXED.search(text))


def limit_was_filled_in(message: str, pod: Manifest) -> bool:
    """True if a Pod is refused for a limit that it does not have: a LimitRange has given it one below its request."""
    found = _FILLED_IN.search(message)
    if found is None or pod.get("kind") != "Pod":
        return False
    group, index, resource = found.group(1), int(found.group(2)), found.group(3)
    containers = (pod.get("spec") or {}).get(group) or []
    limits = (containers[index].get("resources") or {}).get("limits") or {} if index < len(containers) else {}
    return resource not in limits
