"""Admission: refused objects with their messages, until a refusal is lifted."""

from __future__ import annotations

from typing import NamedTuple

from rlrun_operator.kube.resources import BY_KIND


class RefusedError(Exception):
    """Error response of the API server."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class Sort(NamedTuple):
    """One way to refuse an object.

    Attributes:
        status: HTTP status of the response.
        reason: reason of the response.
        text: message with the placeholders `plural`, `kind`, `name` and `mark`.
        pods_only: whether it applies only to pods.
        tries: whether a dry-run is refused too.
        edits: whether changes of existing objects are refused too.
    """

    status: int
    reason: str
    text: str
    pods_only: bool = False
    tries: bool = True
    edits: bool = False


_HEAD = '{plural} "{name}" is forbidden: '
SORTS: dict[str, Sort] = {
    "quota": Sort(
        403,
        "Forbidden",
        _HEAD + "exceeded quota: {mark}, requested: count=1, used: count=8, limited: count=8",
        tries=False,
    ),
    "pod security": Sort(
        403, "Forbidden", _HEAD + 'violates PodSecurity "restricted:{mark}": runAsNonRoot != true', pods_only=True
    ),
    "priority": Sort(403, "Forbidden", _HEAD + "no PriorityClass with name {mark} was found", pods_only=True),
    "webhook": Sort(
        400, "BadRequest", 'admission webhook "{mark}.example.com" denied the request: not now', edits=True
    ),
    "policy": Sort(
        422,
        "Invalid",
        _HEAD + "ValidatingAdmissionPolicy '{mark}' with binding 'all' denied request: not now",
        edits=True,
    ),
    "webhook away": Sort(
        500,
        "InternalError",
        'Internal error occurred: failed calling webhook "{mark}.example.com": failed to call webhook: connection refused',
        edits=True,
    ),
    "invalid": Sort(422, "Invalid", '{kind} "{name}" is invalid: spec.{mark}: Invalid value: "x"'),
}
"""Sorts by name. The operator retries all but the last one."""
FOR_GOOD = "invalid"
OF_WEBHOOKS = ((400, "BadRequest"), (500, "InternalError"), (409, "Conflict"), (404, "NotFound"))
"""Status and reason of a webhook's refusal, which can have any values."""


class Refusal(NamedTuple):
    """Active refusal.

    Attributes:
        mark: unique word in its messages.
        sort: name of a `Sort`.
        kind: kind of the refused objects.
    """

    mark: str
    sort: str
    kind: str

    def check(self, kind: str, name: str, *, dry_run: bool, exists: bool) -> None:
        """Refuse the object if the refusal applies.

        Raises:
            RefusedError: the refusal applies.
        """
        how = SORTS[self.sort]
        if kind != self.kind or (dry_run and not how.tries) or (exists and not how.edits and not dry_run):
            return
        said = how.text.format(plural=BY_KIND[kind].plural, kind=kind, name=name, mark=self.mark)
        status, reason = how.status, how.reason
        if self.sort == "webhook":
            status, reason = OF_WEBHOOKS[sum(map(ord, self.mark)) % len(OF_WEBHOOKS)]
        raise RefusedError(status, reason, said)
