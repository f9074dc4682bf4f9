"""Carries out a decision: ask, dry-run, create, apply, annotate, scale, delete, repair, in this order.

The answers go into the store at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from rlrun_operator.kube.client import ABSENT, ApiError, Client, address
from rlrun_operator.kube.resources import BY_KIND, CLAIM, POD, SECRET, WATCHED
from rlrun_operator.names import MANAGER, RUN_LABEL, is_made_for
from rlrun_operator.render.origin import Cause, causes
from rlrun_operator.runtime.cache import Store
from rlrun_operator.state import Annotate, Apply, Decision, Delete, Grow, Manifest, Scale
from rlrun_operator.status.admission_limits import limit_was_filled_in

_KEPT = {resource.kind for resource in WATCHED}
log = logging.getLogger(__name__)


class RejectedError(Exception):
    """Error for a child that the API server refuses because of the spec.

    Attributes:
        manifest: the child.
        causes: fields of it, and what is wrong with them.
    """

    def __init__(self, message: str, manifest: Manifest, causes: Sequence[Cause]) -> None:
        super().__init__(message)
        self.manifest = manifest
        self.causes = causes


class KeptOutError(Exception):
    """Error for an object that admission does not let in; trying again may help.

    Attributes:
        manifest: the object.
        quota: whether it is a ResourceQuota that leaves no room; a dry-run says nothing about that.
        rest_done: whether all else of the decision was done.
    """

    def __init__(self, message: str, manifest: Manifest, *, quota: bool, rest_done: bool = False) -> None:
        super().__init__(message)
        self.manifest = manifest
        self.quota = quota
        self.rest_done = rest_done


class NameTakenError(Exception):
    """A foreign object has the name that a child needs; the message is that object.

    Attributes:
        manifest: the child.
    """

    def __init__(self, message: str, manifest: Manifest) -> None:
        super().__init__(message)
        self.manifest = manifest


class KeyLostError(Exception):
    """The Secret with the run's API key does not exist any more; the message is its name."""


class StaleViewError(Exception):
    """The cluster is not as observed: the decision was made on a state that is too old. Decide again."""


class Applier:
    """Writes to the cluster.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, client: Client, store: Store, now: Callable[[], float]) -> None:
        self._client = client
        self._store = store
        self._now = now

    async def act(self, namespace: str, decision: Decision) -> None:
        """Do everything of a decision but its status and events.

        Raises:
            RejectedError: a child was refused for what the spec says; nothing after it was done.
            KeptOutError: a child has to wait for a quota or another admission; nothing after it was done, unless it says so.
            StaleViewError: something exists that was taken to be absent; nothing after it was done.
            KeyLostError: the Secret that the decision counts on is gone; nothing was done.
            NameTakenError: a foreign object exists where a child belongs; it is left alone, and nothing after it was done.
            ApiError, UnavailableError: to be retried.
        """
        if decision.ask is not None and await self._is_lost(decision.ask):
            raise KeyLostError(decision.ask["metadata"]["name"])
        for manifest in decision.dry_run:
            await self._tried(manifest)
        for manifest in decision.create:
            await self._create(manifest)
        pod_kept_out: KeptOutError | None = None
        for item in decision.apply:
            try:
                await self._apply(item)
            except KeptOutError as error:
                if item.manifest["kind"] != POD.kind:
                    raise
                pod_kept_out = error  # nothing depends on a pod
        for annotate in decision.annotate:
            await self._annotate(namespace, annotate)
        for scale in decision.scale:
            await self._scale(namespace, scale)
        for delete in decision.delete:
            await self._delete(namespace, delete)
        unrepaired = await self._repaired(decision.repair)
        kept_out = pod_kept_out or unrepaired
        if kept_out is not None:
            raise KeptOutError(str(kept_out), kept_out.manifest, quota=kept_out.quota, rest_done=True)

    async def _repaired(self, parts: Sequence[Apply]) -> KeptOutError | None:
        """Apply each part; the first refusal by admission."""
        refused: KeptOutError | None = None
        for item in parts:
            try:
                await self._apply(item)
            except KeptOutError as error:
                refused = refused or error
        return refused

    async def is_taken(self, manifest: Manifest) -> bool:
        """True if a foreign object has a child's name."""
        try:
            await self._find_own(manifest)
        except NameTakenError:
            return True
        return False

    async def grow(self, namespace: str, grow: Grow) -> str | None:
        """Raise what a claim asks for.

        Returns:
            the API server's words, where it refuses that.

        Raises:
            StaleViewError: the claim is another one, or in another state, than was observed.
            UnavailableError: to be retried.
        """
        preconditions = {"uid": grow.uid} | ({} if grow.version is None else {"resourceVersion": grow.version})
        patch = {"metadata": preconditions, "spec": {"resources": {"requests": {"storage": grow.size}}}}
        try:
            self._learn(await self._client.merge(CLAIM, namespace, grow.claim, patch))
        except ApiError as error:
            found = await self._client.get(CLAIM, namespace, grow.claim)
            if found is not None and preconditions.items() <= found["metadata"].items():
                return error.message
            if found is None or found["metadata"]["uid"] != grow.uid:
                self._store.remove(CLAIM.kind, namespace, grow.claim, grow.uid)
            if found is not None:
                self._learn({**found, "apiVersion": CLAIM.api_version, "kind": CLAIM.kind})
            raise StaleViewError(f"claim {grow.claim} {'has changed' if found is not None else 'is gone'}") from error
        return None

    async def _tried(self, manifest: Manifest) -> None:
        try:
            await self._judged(manifest, self._client.apply(_without_account(manifest), dry_run=True))
        except RejectedError:
            await self._find_own(manifest)  # a foreign one may be what does not go with it
            raise
        except KeptOutError as error:
            if not error.quota:
                raise

    async def _is_lost(self, secret: Manifest) -> bool:
        """True if a Secret could be created. Where admission does not let in any, that is unknown, and none could be made instead."""
        try:
            return await self._client.create(secret, dry_run=True) is not None
        except ApiError as error:
            log.debug("whether %s is there cannot be asked: %s", _what(secret), error)
            return False

    async def _create(self, manifest: Manifest) -> None:
        made = await self._judged(manifest, self._client.create(manifest))
        self._learn(made)
        if (
            made is None and manifest["kind"] != SECRET.kind
        ):  # the operator can read none, and its name holds the run's UID
            self._learn(await self._find_own(manifest))

    async def _apply(self, item: Apply) -> None:
        # Never over what was not looked at: an apply with force takes over what is there, and deletes it with the run.
        expected = item.replaces or (ABSENT if item.expect_absent else None)
        if await self._applied_over(item.manifest, expected or item.known or ABSENT):
            return
        found = await self._find_own(item.manifest)
        if found is None:
            if not await self._applied_over(item.manifest, ABSENT):
                raise StaleViewError(f"{_what(item.manifest)} has appeared")
        elif expected is not None:
            self._learn(found)
            raise StaleViewError(f"{_what(item.manifest)} {'has changed' if item.replaces else 'exists already'}")
        else:
            self._learn(await self._judged(item.manifest, self._client.apply(item.manifest)), applied=True)

    async def _applied_over(self, manifest: Manifest, version: str) -> bool:
        made = await self._judged(manifest, self._client.apply_over(manifest, version))
        self._learn(made, applied=True)
        return made is not None

    async def _find_own(self, manifest: Manifest) -> Manifest | None:
        """The object of a child's name, if there is one.

        Raises:
            NameTakenError: no run of this name has made it, neither this one nor one that was deleted.
        """
        resource, namespace, name = address(manifest)
        found = await self._client.get(resource, namespace, name)
        if found is None:
            return None
        if not _is_own(found, manifest):
            raise NameTakenError(f"{resource.kind} {name}", manifest)
        return {**found, "apiVersion": resource.api_version, "kind": resource.kind}

    async def _annotate(self, namespace: str, annotate: Annotate) -> None:
        """Annotate an object; one that is gone, or is another one now, needs it no more."""
        patch = {"metadata": {"uid": annotate.uid, "annotations": dict(annotate.annotations)}}
        try:
            self._learn(await self._client.merge(BY_KIND[annotate.ref.kind], namespace, annotate.ref.name, patch))
        except ApiError as error:
            if error.status not in (404, 409, 422):  # 409, 422: the UID of a living object cannot be changed
                raise
            log.debug("%s was not annotated: %s", annotate.ref, error)

    async def _scale(self, namespace: str, scale: Scale) -> None:
        resource, name = BY_KIND[scale.ref.kind], scale.ref.name
        try:
            self._learn(await self._client.scale(resource, namespace, name, scale.replicas, uid=scale.uid))
        except ApiError as error:
            if error.status not in (404, 422):  # 422: the UID of a living object cannot be changed
                raise
            found = await self._client.get(resource, namespace, name) if error.status == 422 else None
            if found is not None and found["metadata"]["uid"] == scale.uid:
                raise
            self._store.remove(resource.kind, namespace, name, scale.uid)
            if found is not None:
                self._learn({**found, "apiVersion": resource.api_version, "kind": resource.kind})
            raise StaleViewError(
                f"{resource.kind} {name} {'is gone' if found is None else 'is another one'}"
            ) from error

    async def _delete(self, namespace: str, delete: Delete) -> None:
        answer = await self._client.delete(
            BY_KIND[delete.ref.kind],
            namespace,
            delete.ref.name,
            uid=delete.uid,
            grace_seconds=delete.grace_seconds,
        )
        if answer is not None and answer.get("kind") == delete.ref.kind:
            self._learn(answer)  # ending: it carries a deletionTimestamp now
        else:
            self._store.remove(delete.ref.kind, namespace, delete.ref.name, delete.uid)

    async def _judged(self, manifest: Manifest, call: Awaitable[Manifest | None]) -> Manifest | None:
        try:
            return await call
        except ApiError as error:
            if error.kept_out or limit_was_filled_in(error.message, manifest):
                raise KeptOutError(error.message, manifest, quota=error.over_quota) from error
            if error.refused:
                raise RejectedError(error.message, manifest, causes(error.message, error.details)) from error
            raise

    def _learn(self, manifest: Manifest | None, *, applied: bool = False) -> None:
        if manifest is not None and manifest.get("kind") in _KEPT:
            self._store.put(manifest, self._now(), applied=applied)


def _is_own(found: Manifest, manifest: Manifest) -> bool:
    """True if what exists was made for a run of the name that `manifest` is made for. Any client may copy a label."""
    metadata = found["metadata"]
    made_for, run = ((each["metadata"].get("labels") or {}).get(RUN_LABEL) for each in (found, manifest))
    if made_for != run:
        return False
    if not manifest["metadata"].get("ownerReferences") or is_made_for(metadata, str(run)):
        return True
    return any(entry.get("manager") == MANAGER for entry in metadata.get("managedFields") or ())


def _what(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _without_account(manifest: Manifest) -> Manifest:
    """A Pod as it can be dry-run: its ServiceAccount is made later, and is not what the user's template is judged by."""
    if manifest["kind"] != POD.kind:
        return manifest
    spec = {name: value for name, value in manifest["spec"].items() if name != "serviceAccountName"}
    return {**manifest, "spec": spec}
