"""API server in memory: uids, generations, resourceVersions, preconditions, apply and merge patches, graceful
deletion.

Objects are immutable values: a change creates a new one. No copies are needed, and delivered events stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlrun_operator.kube.resources import BY_KIND, CLAIM, EVENT, PART_KINDS, RLRUN, WATCHED
from rlrun_operator.names import MANAGER, RUN_LABEL
from rlrun_operator.times import format_rfc3339, seconds_of
from tests.sim.cluster.admission import Refusal, RefusedError
from tests.sim.cluster.gpus import GpuTime

NAMESPACE = "team-a"
GRACE_SECONDS = 30
EVENTS_KEPT = 30
Json = dict[str, Any]
Ident = tuple[str, str]
"""Kind and name, within one namespace."""
_KINDS = {resource.plural: resource.kind for resource in BY_KIND.values()}
_WATCHED = {resource.kind for resource in WATCHED}
_UNSELECTED = {RLRUN.kind, CLAIM.kind}
_UNGUARDED = {RLRUN.kind, EVENT.kind}
"""Kinds that admission never refuses: the run belongs to its author."""
_STATUS_APART = {RLRUN.kind}
"""Kinds whose status only the subresource changes. Statuses of other kinds are written only by their controllers."""


class Api:
    """Objects and the pending events of their watches.

    Args:
        now: function that returns seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.kinds: dict[str, dict[str, Json]] = {kind: {} for kind in BY_KIND}
        self.news: list[tuple[str, Json]] = []
        """(type, object) of every change of a watched object, in order; the watcher removes them."""
        self.writes = 0
        self.refusals: list[Refusal] = []
        """Active refusals."""
        self.version = 100
        self.gpu_time = GpuTime()

    # ---- state

    def get(self, kind: str, name: str) -> Json | None:
        return self.kinds[kind].get(name)

    def all(self, kind: str) -> list[Json]:
        return list(self.kinds[kind].values())

    def put(self, found: Json, **changes: Any) -> Json:
        """Store a new state of `found` with replaced top-level parts `changes`; return the same object if nothing
        changes.
        """
        kind, name = found["kind"], found["metadata"]["name"]
        if all(found.get(part) == value for part, value in changes.items()):
            return found
        self.version += 1
        metadata = changes.get("metadata", found["metadata"]) | {"resourceVersion": str(self.version)}
        if "spec" in changes and changes["spec"] != found.get("spec"):
            metadata["generation"] = metadata.get("generation", 1) + 1
        new = {**found, **changes, "metadata": metadata}
        self.kinds[kind][name] = new
        self._tell("MODIFIED", new)
        return new

    def admit(self, kind: str, name: str, *, dry_run: bool = False) -> None:
        """Admit an object.

        Raises:
            RefusedError: a refusal applies.
        """
        for refusal in self.refusals:
            refusal.check(kind, name, dry_run=dry_run, exists=name in self.kinds[kind])

    def warn(self, about: Ident, reason: str, message: str, *, age: float = 0.0, uid: str | None = None) -> None:
        """Record a Warning event about an object; a repeated one is counted. Watches do not deliver it.

        Args:
            about: the object.
            reason: reason of the event.
            message: message of the event.
            age: seconds since its occurrence, because events may be late.
            uid: UID of the object, if the event contains it.
        """
        name = "/".join((*about, reason, message))
        when = format_rfc3339(self._now() - age)
        events = self.kinds[EVENT.kind]
        known = events.get(name)
        if known is not None and age:
            return
        events[name] = {
            "kind": EVENT.kind,
            "metadata": {"name": name},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "involvedObject": {"kind": about[0], "name": about[1], "uid": uid},
            "lastTimestamp": when,
        }
        while len(events) > EVENTS_KEPT:
            del events[next(iter(events))]

    def add(self, manifest: Mapping[str, Any]) -> Json:
        """Add a new object."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self.version += 1
        metadata = {
            **manifest["metadata"],
            "namespace": NAMESPACE,
            "uid": f"{self.version:08x}-{name}-{self.version}",
            "resourceVersion": str(self.version),
            "generation": 1,
            "creationTimestamp": format_rfc3339(self._now()),
        }
        new = {**manifest, "metadata": metadata}
        if kind in ("Pod", CLAIM.kind):
            new["status"] = {"phase": "Pending"}
        self.kinds[kind][name] = new
        self._tell("ADDED", new)
        return new

    def drop(self, kind: str, name: str) -> Json:
        """Remove an object immediately; the garbage collector handles its dependents."""
        found = self.kinds[kind].pop(name)
        self.version += 1
        self._tell("DELETED", {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}})
        return found

    def end(self, kind: str, name: str, grace: int = GRACE_SECONDS) -> Json:
        """Delete an object; a pod with a node ends first."""
        found = self.kinds[kind][name]
        if kind == CLAIM.kind and self.mounts(name):  # protected until no pod uses it
            times = {"deletionTimestamp": format_rfc3339(self._now())}
            return (
                found
                if times.items() <= found["metadata"].items()
                else self.put(found, metadata=found["metadata"] | times)
            )
        if kind != "Pod" or not grace or "nodeName" not in found["spec"]:
            return self.drop(kind, name)
        ends, given = self._now() + grace, found["metadata"].get("deletionGracePeriodSeconds")
        if given is not None:
            if grace >= given:
                return found
            asked = (seconds_of(found["metadata"]["deletionTimestamp"]) or 0.0) - given
            ends = max(
                asked + grace, self._now()
            )  # a shorter period counts from the first request and does not end in the past
        times = {"deletionTimestamp": format_rfc3339(ends), "deletionGracePeriodSeconds": grace}
        return self.put(found, metadata=found["metadata"] | times)

    def mounts(self, claim: str) -> bool:
        """Whether a pod with a node uses the claim and has not ended."""
        pods = [pod for pod in self.kinds["Pod"].values() if "nodeName" in pod["spec"]]
        return any(claim_of(pod) == claim for pod in pods if pod["status"]["phase"] not in ("Failed", "Succeeded"))

    def _tell(self, event: str, found: Json) -> None:
        kind = found["kind"]
        if kind == "Pod":
            self.gpu_time.saw(event, found, self._now())
        if kind in _WATCHED and (kind in _UNSELECTED or RUN_LABEL in (found["metadata"].get("labels") or ())):
            self.news.append((event, found))

    # ---- requests

    def answer(self, method: str, path: str, query: Mapping[str, str], body: Any, content: str) -> Json:
        """Execute one request.

        Raises:
            RefusedError: the status is 400 or higher.
        """
        kind, name, subresource = _target(path)
        if method == "GET":
            if name is None:
                return {"metadata": {}, "items": self._selected(kind, query)}
            found = self.get(kind, name)
            if found is None:
                raise RefusedError(404, "NotFound", f"{path} not found")
            return found
        applies = method == "PATCH" and content.startswith("application/apply")
        if (applies or method == "POST") and kind != EVENT.kind:
            self.admit(kind, body["metadata"]["name"], dry_run="dryRun" in query)
        if method == "PATCH" and query.get("dryRun"):
            return dict(body)
        if method == "POST" and query.get("dryRun"):
            if self.get(kind, body["metadata"]["name"]) is not None:
                raise RefusedError(409, "AlreadyExists", f"{kind} {body['metadata']['name']} already exists")
            return dict(body)
        if method in ("PATCH", "DELETE") and not applies and kind not in _UNGUARDED and self.get(kind, str(name)):
            self.admit(kind, str(name))
        self.writes += 1
        if method == "POST":
            return self._create(kind, body)
        if method == "DELETE":
            return self._delete(kind, str(name), body)
        if applies:
            return self._apply(kind, str(name), body, force=query.get("force") == "true")
        return self._merge(kind, str(name), subresource, body)

    def refuses(self, path: str, body: Any) -> bool:
        """Whether the preconditions of a request do not match the object, so that it changes nothing."""
        kind, name, _ = _target(path)
        found = self.get(kind, name) if name is not None else None
        if found is None or not isinstance(body, Mapping):
            return False
        meant = body.get("preconditions") or body.get("metadata") or {}
        return any(meant.get(key) not in (None, found["metadata"][key]) for key in ("uid", "resourceVersion"))

    def _selected(self, kind: str, query: Mapping[str, str]) -> list[Json]:
        selector = query.get("labelSelector")
        found = self.all(kind)
        if selector:
            found = [o for o in found if selector in (o["metadata"].get("labels") or ())]
        return found

    def _create(self, kind: str, body: Json) -> Json:
        name = body["metadata"]["name"]
        if kind == EVENT.kind:
            return body
        if name in self.kinds[kind]:
            raise RefusedError(409, "AlreadyExists", f"{kind} {name} already exists")
        return self.add(body)

    def _apply(self, kind: str, name: str, body: Json, *, force: bool) -> Json:
        found = self.get(kind, name)
        if kind in PART_KINDS:
            body = {**body, "metadata": body["metadata"] | {"managedFields": [_held(body)]}}
        if found is None:
            return self.add(body)  # with any resourceVersion, like the real API server
        if body["metadata"].get("resourceVersion") not in (None, found["metadata"]["resourceVersion"]):
            raise RefusedError(409, "Conflict", "the object has been modified")
        if not force and RUN_LABEL not in (found["metadata"].get("labels") or ()):
            raise RefusedError(409, "Conflict", 'Apply failed with 1 conflict: conflict with "somebody"')
        if kind == "Pod" and any(found["spec"].get(k) != v for k, v in body["spec"].items()):
            raise RefusedError(
                422, "Invalid", f'Pod "{name}" is invalid: spec: Forbidden: pod updates may not change fields'
            )
        metadata = dict(found["metadata"])
        for part, value in body["metadata"].items():
            merges = isinstance(value, dict) and isinstance(metadata.get(part), dict)
            metadata[part] = metadata[part] | value if merges else value
        rest = {part: value for part, value in body.items() if part not in ("metadata", "status")}
        return self.put(found, **rest, metadata=metadata)

    def _merge(self, kind: str, name: str, subresource: str | None, patch: Json) -> Json:
        if kind == EVENT.kind:
            return patch
        found = self.get(kind, name)
        if found is None:
            raise RefusedError(404, "NotFound", f"{kind} {name} not found")
        metadata = patch.get("metadata", {})
        if (
            metadata.get("resourceVersion", found["metadata"]["resourceVersion"])
            != found["metadata"]["resourceVersion"]
        ):
            raise RefusedError(409, "Conflict", "resourceVersion does not match")
        if metadata.get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            raise RefusedError(422, "Invalid", "metadata.uid: field is immutable")
        if subresource == "status":
            return self.put(found, status=merged(found.get("status"), patch.get("status", {})))
        kept = {"metadata", "status"} if kind in _STATUS_APART else {"metadata"}
        changed = {part: merged(found.get(part), value) for part, value in patch.items() if part not in kept}
        if "annotations" in metadata:
            annotations = merged(found["metadata"].get("annotations"), metadata["annotations"])
            changed["metadata"] = found["metadata"] | {"annotations": annotations}
        if "ownerReferences" in metadata:
            changed["metadata"] = found["metadata"] | {"ownerReferences": metadata["ownerReferences"]}
        return self.put(found, **changed)

    def _delete(self, kind: str, name: str, options: Json) -> Json:
        found = self.get(kind, name)
        if found is None:
            raise RefusedError(404, "NotFound", f"{kind} {name} not found")
        uid = (options.get("preconditions") or {}).get("uid")
        if uid is not None and uid != found["metadata"]["uid"]:
            raise RefusedError(409, "Conflict", "the UID in the precondition does not match")
        self.end(kind, name, options.get("gracePeriodSeconds", GRACE_SECONDS))
        return self.get(kind, name) or {"kind": "Status"}


def _held(body: Json) -> Json:
    """Return the entry of `managedFields` after a forced apply: all fields."""
    return {"manager": MANAGER, "operation": "Apply", "fieldsV1": _fields(body)}


def _fields(value: Any) -> Json:
    return {f"f:{name}": _fields(inner) for name, inner in value.items()} if isinstance(value, dict) else {}


def claim_of(pod: Json) -> str | None:
    """Return the claim that a pod mounts, or None."""
    volumes = pod["spec"].get("volumes") or ()
    return next((v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v), None)


def merged(old: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386) and return a new value."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _target(path: str) -> tuple[str, str | None, str | None]:
    parts = path.split("/")[3 if path.startswith("/api/") else 4 :]
    if parts[0] == "namespaces":
        parts = parts[2:]
    kind, *rest = parts
    return _KINDS[kind], rest[0] if rest else None, rest[1] if len(rest) > 1 else None
