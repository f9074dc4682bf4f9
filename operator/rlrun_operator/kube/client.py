"""Minimal client of the Kubernetes API: the few calls that the operator needs, each with a deadline, each counted."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from pydantic_core import to_json

from rlrun_operator.kube.json_reader import UnreadableError, parse_json
from rlrun_operator.kube.resources import BY_KIND, Resource
from rlrun_operator.names import MANAGER
from rlrun_operator.state import Json, Manifest

REQUEST_SECONDS = 10.0
"""Deadline of one request."""
WRITE_SECONDS = 35.0
"""Deadline of one write. The API server waits at most 34 s for webhooks, and then names the webhook that did not answer."""
PAGE = 250
"""Objects per page of a list."""

ABSENT = "1"
"""A resourceVersion older than that of every object of a run (etcd's first revision). An apply with it only creates, never changes."""

_JSON = "application/json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_UNCHECKED = {"fieldValidation": "Ignore"}
"""Without it the API server parses each body a second time, to warn about dropped fields; the operator does not read warnings."""
_RBAC = re.compile(r'User "[^"]*" cannot \w+ resource')
_QUOTA = re.compile(r"exceeded quota|failed quota")
_PASSING = re.compile(
    r"error looking up service account|because it is being terminated|not yet ready to handle request"
)
"""Temporary refusals by admission: an account that is being created, or an API server that has just started."""
_DENIED = re.compile(r"admission webhook \"|ValidatingAdmissionPolicy '")
"""Refusals by webhooks and policies, which may have any status."""
_NOT_ASKED = "failed calling webhook"
"""A required webhook is unreachable: status 500, until somebody repairs it."""
_TIMED_OUT = (504, "Timeout")
"""Webhooks used up the deadline of a write: slow answers together, or one that never answered."""
_WRONG_SHAPE = "failed to create typed patch object"
"""Message of server-side apply, with status 500, for a field that does not exist or has another type."""

_TWO_OWNERS = "Only one reference can have Controller set to true"
"""The object still belongs to a deleted run of the same name, and will be deleted with it."""

Count = Callable[[str, str, str], None]
"""(verb, resource, code) of one request."""


class ApiError(Exception):
    """Refusal of a request by the API server."""

    def __init__(
        self, status: int, reason: str, message: str, what: str, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.what = what
        """The request, for the log: verb and path."""
        self.details: Mapping[str, object] = details or {}
        """Details of the `Status`, with the causes."""

    def __str__(self) -> str:
        return f"{self.what}: {self.status} {self.message}"

    @property
    def lacks_permission(self) -> bool:
        """Whether the operator's own rights are insufficient: a fault of the installation, not of the run."""
        return self.status == 403 and bool(_RBAC.search(self.message))

    @property
    def over_quota(self) -> bool:
        """Whether a ResourceQuota is used up; may be temporary."""
        return self.status == 403 and bool(_QUOTA.search(self.message))

    @property
    def kept_out(self) -> bool:
        """Whether admission refused or failed: a quota, Pod Security, a missing PriorityClass, a webhook or policy. This may change."""
        if self.status == 403:
            return not (self.lacks_permission or _PASSING.search(self.message))
        return _is_of_admission(self.status, self.reason, self.message)

    @property
    def is_withheld(self) -> bool:
        """Whether the write must wait for a change of admission or of the operator's rights: it is reported and retried."""
        return self.kept_out or self.lacks_permission

    @property
    def refused(self) -> bool:
        """Whether validation refused the object itself: a retry cannot help."""
        if self.status == 403 or self.kept_out:
            return False
        return (self.status in (400, 422) and _TWO_OWNERS not in self.message) or _WRONG_SHAPE in self.message


class UnavailableError(Exception):
    """Error for an API server that does not answer, or answers that it is temporarily unavailable."""


@dataclass(frozen=True)
class Call:
    """Method, address and names of a request."""

    method: str
    """HTTP method."""
    verb: str
    """Verb in metrics and messages."""
    resource: str
    """Resource in the metrics."""
    path: str


class Client:
    """Requests to one API server.

    Args:
        session: session from `Connection.session`; the caller closes it.
        server: base URL.
        count: callback for every request.
        may_write: check before each write; it raises if this process must not write (another one leads).
        clock: steady seconds.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: str,
        count: Count = lambda verb, resource, code: None,
        may_write: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._server = server
        self._count = count
        self.may_write = may_write
        self._clock = clock
        self._answering_since: float | None = None

    def answering_seconds(self) -> float:
        """Return the seconds since which every request was answered; 0 if the last one was not."""
        return 0.0 if self._answering_since is None else self._clock() - self._answering_since

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Json | None:
        """Return one object, or None if it does not exist."""
        try:
            return await self.request(Call("GET", "get", resource.plural, resource.path(namespace, name)))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[Json]:
        """Yield all matching objects, page by page, each with its kind. `metadata_only`: only with their metadata."""
        query = {"limit": str(PAGE)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        while True:
            page = await self.request(
                Call("GET", "list", resource.plural, resource.path(namespace)),
                query=query,
                accept=_METADATA_LIST if metadata_only else _JSON,
            )
            for item in page.get("items") or ():
                yield {
                    **(item if isinstance(item, dict) else {}),
                    "apiVersion": resource.api_version,
                    "kind": resource.kind,
                }
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query = {**query, "continue": token}

    async def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Json:
        """Apply a complete object server-side."""
        resource, namespace, name = address_of(manifest)
        query = {"fieldManager": MANAGER, "force": "true", **({"dryRun": "All"} if dry_run else _UNCHECKED)}
        return await self.request(
            Call("PATCH", "dry-run" if dry_run else "apply", resource.plural, resource.path(namespace, name)),
            query=query,
            body=manifest,
            content=_APPLY,
            write=not dry_run,
        )

    async def apply_over(self, manifest: Manifest, version: str) -> Json | None:
        """Apply a complete object server-side, only over this version of it.

        Args:
            manifest: the object.
            version: expected resourceVersion; `ABSENT`: the object does not exist.

        Returns:
            The object, or None if it has another version, which is not changed. A missing object is created for any `version`.
        """
        try:
            return await self.apply({**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}})
        except ApiError as error:
            if error.status == 409 and not error.kept_out:
                return None
            raise

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Json | None:
        """Create an object. Returns None if an object of this name exists, which is not changed."""
        resource, namespace, _ = address_of(manifest)
        try:
            return await self.request(
                Call("POST", "dry-run" if dry_run else "create", resource.plural, resource.path(namespace)),
                query={"fieldManager": MANAGER, **({"dryRun": "All"} if dry_run else _UNCHECKED)},
                body=manifest,
                write=not dry_run,
            )
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists" and not error.kept_out:
                return None
            raise

    async def merge_patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Mapping[str, object],
        *,
        subresource: str | None = None,
        seconds: float | None = None,
    ) -> Json:
        """Apply a JSON merge patch; `metadata.resourceVersion` (409) and `metadata.uid` (422) in it are preconditions."""
        kind = resource.plural + (f"/{subresource}" if subresource else "")
        return await self.request(
            Call("PATCH", "patch", kind, resource.path(namespace, name, subresource)),
            query={"fieldManager": MANAGER, **_UNCHECKED},
            body=patch,
            content=_MERGE,
            write=True,
            seconds=seconds,
        )

    async def put_status(self, resource: Resource, namespace: str, name: str, document: Mapping[str, object]) -> Json:
        """PUT a complete status; `metadata.resourceVersion` in the document is a precondition (409)."""
        return await self.request(
            Call("PUT", "update", f"{resource.plural}/status", resource.path(namespace, name, "status")),
            query={"fieldManager": MANAGER, **_UNCHECKED},
            body=document,
            write=True,
        )

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, *, uid: str) -> Json:
        """Set only the replicas of the object with this UID. Not by the scale subresource, because this returns the complete object."""
        return await self.merge_patch(
            resource, namespace, name, {"metadata": {"uid": uid}, "spec": {"replicas": replicas}}
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Json | None:
        """Delete one object in the background. Returns None if it is gone or a successor has its name."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        call = Call("DELETE", "delete", resource.plural, resource.path(namespace, name))
        try:
            return await self.request(call, body=options, write=True)
        except ApiError as error:
            if error.status in (404, 409) and not error.kept_out:
                return None
            raise

    async def request(
        self,
        call: Call,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content: str = _JSON,
        accept: str = _JSON,
        write: bool = False,
        seconds: float | None = None,
    ) -> Json:
        """Send one request.

        Args:
            call: method, address and names.
            query: parameters of the URL.
            body: document to send.
            content: media type of the body.
            accept: requested media type of the answer.
            write: whether to call `may_write` first.
            seconds: deadline; None: that of admission for writes and dry runs, a short one for reads.

        Raises:
            ApiError: the API server refused the request.
            UnavailableError: no answer, or 429 or 5xx that does not come from admission.
        """
        if write:
            self.may_write()
        what = f"{call.verb} {call.path}"
        code, answering = "error", False
        seconds = seconds or (WRITE_SECONDS if write or "dryRun" in (query or {}) else REQUEST_SECONDS)
        try:
            async with self._session.request(
                call.method,
                self._server + call.path,
                params=query,
                data=None if body is None else to_json(body),
                headers={"Accept": accept} | ({"Content-Type": content} if body is not None else {}),
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=REQUEST_SECONDS),
            ) as response:
                code = str(response.status)
                raw = await response.read()
            answering = response.status < 500
            return _read_answer(response.status, raw, what, reads=call.method == "GET")
        except ApiError:
            answering = True  # regardless of the status: a webhook may refuse with any
            raise
        except TimeoutError as error:
            code = "timeout" if code == "error" else code
            raise UnavailableError(f"{what}: no answer within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{what}: {error}") from error
        finally:
            self._count(call.verb, call.resource, code)
            if not answering:
                self._answering_since = None
            elif self._answering_since is None:
                self._answering_since = self._clock()


def address_of(manifest: Manifest) -> tuple[Resource, str, str]:
    """Return resource, namespace and name of a manifest."""
    return BY_KIND[manifest["kind"]], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _read_answer(status: int, raw: bytes, what: str, *, reads: bool) -> Json:
    try:
        document = parse_json(raw)
        if not isinstance(document, dict):
            raise UnreadableError(f"not an object: {raw[:80].decode(errors='replace')!r}")
    except UnreadableError as error:
        # Never return an empty object: it would mean that an object has no fields. A proxy that answers in place of the API server does
        # not know the object either: its error means neither deleted nor refused. Only a read of an unserved path has a plain-text 404.
        if status < 400 or not reads:
            raise UnavailableError(f"{what}: {status}, and the answer is unreadable: {error}") from error
        document = {}
    if status < 400:
        return document
    message = str(document.get("message") or raw[:200].decode(errors="replace") or "no reason given")
    reason = str(document.get("reason", ""))
    verdict = _WRONG_SHAPE in message or (not reads and _is_of_admission(status, reason, message))
    if (status == 429 or status >= 500) and not verdict:
        raise UnavailableError(f"{what}: {status} {message}")
    details = document.get("details")
    raise ApiError(status, reason, message, what, details if isinstance(details, dict) else None)


def _is_of_admission(status: int, reason: str, message: str) -> bool:
    """Return whether webhooks or policies, which refuse with any status, refused a write or were unreachable."""
    asked = bool(_DENIED.search(message)) or _NOT_ASKED in message or (status, reason) == _TIMED_OUT
    return status >= 400 and asked
