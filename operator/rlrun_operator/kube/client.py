"""A thin client of the Kubernetes API: the few calls that the operator makes, each with a deadline, each counted."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from pydantic_core import to_json

from rlrun_operator.kube.json_reader import UnreadableError, parse_json
from rlrun_operator.kube.resources import BY_KIND, Resource
from rlrun_operator.names import MANAGER
from rlrun_operator.state import Json, Manifest

REQUEST_SECONDS = 10.0
"""Deadline of one request."""
WRITE_SECONDS = 35.0
"""Deadline of one write. The API server waits for webhooks 34 s at most, and then says which one it has waited for."""
PAGE = 250
"""Objects per page of a list."""

ABSENT = "1"
"""A resourceVersion that no object of a run has: etcd's first revision is older than any. An apply with it makes an object or nothing."""

_JSON = "application/json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_UNCHECKED = {"fieldValidation": "Ignore"}
"""Else the API server reads each body once more, to warn of fields that it drops, and nothing here reads warnings."""
_RBAC = re.compile(r'User "[^"]*" cannot \w+ resource')
_QUOTA = re.compile(r"exceeded quota|failed quota")
_PASSING = re.compile(
    r"error looking up service account|because it is being terminated|not yet ready to handle request"
)
"""Admission that lacks something for a moment: an account that is being made, an API server that has just started."""
_DENIED = re.compile(r"admission webhook \"|ValidatingAdmissionPolicy '")
"""Webhooks and policies refuse with any status."""
_NOT_ASKED = "failed calling webhook"
"""A webhook that is not there, and without which nothing is let in: status 500, until it is put right."""
_TIMED_OUT = (504, "Timeout")
"""Webhooks have taken all the time that a write may: each of them answers, or is waited for in vain."""
_WRONG_SHAPE = "failed to create typed patch object"
"""Server-side apply says so, with status 500, of a field that does not exist or has another type."""

_TWO_OWNERS = "Only one reference can have Controller set to true"
"""The object still belongs to a deleted run of the same name, and goes with it."""

Count = Callable[[str, str, str], None]
"""(verb, resource, code) of one request."""


class ApiError(Exception):
    """The API server refused a request."""

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
        """The operator's own rights do not suffice: a matter of the installation, not of the run."""
        return self.status == 403 and bool(_RBAC.search(self.message))

    @property
    def over_quota(self) -> bool:
        """A ResourceQuota is used up; may pass."""
        return self.status == 403 and bool(_QUOTA.search(self.message))

    @property
    def kept_out(self) -> bool:
        """Admission says no, or cannot be asked: a quota, Pod Security, a missing PriorityClass, a webhook or policy. That may change."""
        if self.status == 403:
            return not (self.lacks_permission or _PASSING.search(self.message))
        return _is_of_admission(self.status, self.reason, self.message)

    @property
    def withheld(self) -> bool:
        """A write stays undone until admission, or the operator's rights, are put right: it is reported, and tried again."""
        return self.kept_out or self.lacks_permission

    @property
    def refused(self) -> bool:
        """Validation says no to the object itself: asking again cannot help."""
        if self.status == 403 or self.kept_out:
            return False
        return (self.status in (400, 422) and _TWO_OWNERS not in self.message) or _WRONG_SHAPE in self.message


class UnavailableError(Exception):
    """Error for an API server that did not answer, or answered that it cannot now."""


class Client:
    """Requests to one API server.

    Args:
        session: made by `Connection.session`; closed by the caller.
        server: base URL.
        count: called for every request.
        may_write: raises when this process must not write (another one leads).
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

    def answering(self) -> float:
        """Seconds since which every request was answered; 0 when the last one was not."""
        return 0.0 if self._answering_since is None else self._clock() - self._answering_since

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Json | None:
        """One object, or None when it does not exist."""
        try:
            return await self.request("GET", "get", resource.plural, resource.path(namespace, name))
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
        """All objects that match, page by page; each with its kind. `metadata_only`: of each no more than its metadata."""
        query = {"limit": str(PAGE)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        while True:
            page = await self.request(
                "GET",
                "list",
                resource.plural,
                resource.path(namespace),
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
        """Server-side apply of a whole object."""
        resource, namespace, name = address_of(manifest)
        query = {"fieldManager": MANAGER, "force": "true", **({"dryRun": "All"} if dry_run else _UNCHECKED)}
        return await self.request(
            "PATCH",
            "dry-run" if dry_run else "apply",
            resource.plural,
            resource.path(namespace, name),
            query=query,
            body=manifest,
            content=_APPLY,
            write=not dry_run,
        )

    async def apply_over(self, manifest: Manifest, version: str) -> Json | None:
        """Server-side apply of a whole object, over this very state of it.

        Args:
            manifest: the object.
            version: its resourceVersion before; `ABSENT`: it does not exist.

        Returns:
            None when its state is another one, which is left as it is. An object that does not exist is made, whatever `version` is.
        """
        try:
            return await self.apply({**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}})
        except ApiError as error:
            if error.status == 409 and not error.kept_out:
                return None
            raise

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Json | None:
        """Create an object; None when one of this name exists, which is left as it is."""
        resource, namespace, _ = address_of(manifest)
        try:
            return await self.request(
                "POST",
                "dry-run" if dry_run else "create",
                resource.plural,
                resource.path(namespace),
                query={"fieldManager": MANAGER, **({"dryRun": "All"} if dry_run else _UNCHECKED)},
                body=manifest,
                write=not dry_run,
            )
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists" and not error.kept_out:
                return None
            raise

    async def merge(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Mapping[str, object],
        *,
        subresource: str | None = None,
        seconds: float | None = None,
    ) -> Json:
        """JSON merge patch; `metadata.resourceVersion` (409) and `metadata.uid` (422) in it are preconditions."""
        return await self.request(
            "PATCH",
            "patch",
            resource.plural + (f"/{subresource}" if subresource else ""),
            resource.path(namespace, name, subresource),
            query={"fieldManager": MANAGER, **_UNCHECKED},
            body=patch,
            content=_MERGE,
            write=True,
            seconds=seconds,
        )

    async def put_status(self, resource: Resource, namespace: str, name: str, document: Mapping[str, object]) -> Json:
        """PUT of a whole status; `metadata.resourceVersion` in the document is a precondition (409)."""
        return await self.request(
            "PUT",
            "update",
            f"{resource.plural}/status",
            resource.path(namespace, name, "status"),
            query={"fieldManager": MANAGER, **_UNCHECKED},
            body=document,
            write=True,
        )

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, *, uid: str) -> Json:
        """Set the replicas of this very object and nothing else. Not by the scale subresource: this answers with the whole object."""
        return await self.merge(resource, namespace, name, {"metadata": {"uid": uid}, "spec": {"replicas": replicas}})

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Json | None:
        """Delete one object in the background; None when it is gone or a successor has its name."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        path = resource.path(namespace, name)
        try:
            return await self.request("DELETE", "delete", resource.plural, path, body=options, write=True)
        except ApiError as error:
            if error.status in (404, 409) and not error.kept_out:
                return None
            raise

    async def request(
        self,
        method: str,
        verb: str,
        resource: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content: str = _JSON,
        accept: str = _JSON,
        write: bool = False,
        seconds: float | None = None,
    ) -> Json:
        """One request.

        Args:
            verb: for the metrics.
            resource: likewise.
            write: asks `may_write` first.
            seconds: deadline; None: of a write, and of its dry run, that of admission, and of a read a short one.

        Raises:
            ApiError: refused.
            UnavailableError: no answer, or 429 or 5xx that is no verdict of admission.
        """
        if write:
            self.may_write()
        what = f"{verb} {path}"
        code, answering = "error", False
        seconds = seconds or (WRITE_SECONDS if write or "dryRun" in (query or {}) else REQUEST_SECONDS)
        try:
            async with self._session.request(
                method,
                self._server + path,
                params=query,
                data=None if body is None else to_json(body),
                headers={"Accept": accept} | ({"Content-Type": content} if body is not None else {}),
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=REQUEST_SECONDS),
            ) as response:
                code = str(response.status)
                raw = await response.read()
            answering = response.status < 500
            return _read_answer(response.status, raw, what, reads=method == "GET")
        except ApiError:
            answering = True  # whatever the status is: a webhook may refuse with any
            raise
        except TimeoutError as error:
            code = "timeout" if code == "error" else code
            raise UnavailableError(f"{what}: no answer within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{what}: {error}") from error
        finally:
            self._count(verb, resource, code)
            if not answering:
                self._answering_since = None
            elif self._answering_since is None:
                self._answering_since = self._clock()


def address_of(manifest: Manifest) -> tuple[Resource, str, str]:
    """Resource, namespace and name of a manifest."""
    return BY_KIND[manifest["kind"]], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _read_answer(status: int, raw: bytes, what: str, *, reads: bool) -> Json:
    try:
        document = parse_json(raw)
        if not isinstance(document, dict):
            raise UnreadableError(f"no object: {raw[:80].decode(errors='replace')!r}")
    except UnreadableError as error:
        # Never an empty object instead: it would say that something has no fields. And what stands before an API server, and answers for
        # it, knows of no object: what it refuses is neither gone nor refused. A read of what is not served has a plain 404, though.
        if status < 400 or not reads:
            raise UnavailableError(f"{what}: {status}, and the answer cannot be read: {error}") from error
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
    """True if webhooks or policies, which refuse with any status, have answered a write, or cannot be asked."""
    asked = bool(_DENIED.search(message)) or _NOT_ASKED in message or (status, reason) == _TIMED_OUT
    return status >= 400 and asked
