"""Write requests of a decision, in order. The objects in the responses are stored in the cache at once."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun_operator.kube.client import ABSENT, ApiError, Client, UnavailableError, address_of
from rlrun_operator.kube.resources import BY_KIND, CLAIM, DEPLOYMENT, POD, SECRET, STATEFUL_SET, WATCHED
from rlrun_operator.names import MANAGER, RUN_LABEL, Ref, is_made_for
from rlrun_operator.render.field_origin import Cause, refusal_causes
from rlrun_operator.runtime.cache import Store
from rlrun_operator.state import (
    MADE,
    Annotate,
    Apply,
    CheckSecret,
    Create,
    Decision,
    Delete,
    Disown,
    DryRun,
    Grow,
    Manifest,
    Refusal,
    Scale,
    Write,
)
from rlrun_operator.status.claim_messages import is_fixed, limit_was_filled_in

_KEPT = {resource.kind for resource in WATCHED}
_WORKS_WITH = {
    STATEFUL_SET.kind: frozenset[str](),
    DEPLOYMENT.kind: frozenset({STATEFUL_SET.kind}),
    POD.kind: frozenset({STATEFUL_SET.kind, DEPLOYMENT.kind}),
}
"""Workloads that must exist before each workload. Attempts are created in this order, so that no GPU waits for a refused object."""
ACT_SECONDS = 30.0
"""Seconds in which the writes of a decision have to start: with slow webhooks, the writes of a starting attempt take minutes."""
ASKED = "be looked for"
"""Name of the check for a Secret, as in "cannot be looked for"; it changes nothing."""
log = logging.getLogger(__name__)


OutcomeKind = Literal["done", "not-admitted", "not-grown", "invalid", "name-taken", "key-lost", "stale"]
"""Result of the writes of a decision:

- done: every write was made.
- not-admitted: a quota, another admission check or a missing permission refuses some writes, and a retry may help. All writes that do not
  depend on them were made.
- not-grown: the API server does not enlarge the claim. No later write was made.
- invalid: the API server refuses a child because of the specification. No later write was made.
- name-taken: a foreign object has the name of a child. It was not changed, and no later write was made.
- key-lost: the Secret with the run's API key does not exist any more. Nothing was written.
- stale: the cluster differs from the observation. No later write was made, and the caller decides again.
"""


@dataclass(frozen=True)
class Outcome:
    """Result of the writes of one decision."""

    kind: OutcomeKind
    text: str = ""
    """Message of the API server; for stale: the difference."""
    child: Manifest | None = None
    """Child of an invalid or name-taken outcome."""
    causes: Sequence[Cause] = ()
    """Invalid fields of that child, each with the reason."""
    refused: tuple[Refusal, ...] = ()
    """Refused writes; none if the outcome is done or stale."""
    created: bool = True
    """Whether all objects to create and apply exist, except a pod, on which nothing depends."""


DONE = Outcome("done")


class _StopError(Exception):
    """End of one write with an outcome other than done."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Applier:
    """Writes to the cluster.

    Args:
        client: client of the API server.
        store: cache, which gets the objects in the responses.
        now: returns seconds since the epoch.
        clock: returns steady seconds.
    """

    def __init__(self, client: Client, store: Store, now: Callable[[], float], clock: Callable[[], float]) -> None:
        self._client = client
        self._store = store
        self._now = now
        self._clock = clock

    async def make_writes(self, namespace: str, decision: Decision) -> Outcome:
        """Make the writes of a decision, one after the other. A refused write stops only the writes that depend on it.

        Raises:
            ApiError, UnavailableError: the pass has to be retried; also if the writes take longer than `ACT_SECONDS`.
        """
        until = self._clock() + ACT_SECONDS
        failed, refused, late = list[Write](), list[Refusal](), False
        for write in decision.writes:
            # Only the writes that depend on a refused one are left out: with a stop at the first refusal, one
            # object blocked all repairs and the report of progress (decision 104).
            if _depends_on_failed(write, failed):
                continue
            # Each write may wait for a webhook; no webhook may block this operator for long.
            if late := self._clock() >= until:
                break
            try:
                await self._make_write(namespace, write)
            except _StopError as error:
                # Every other outcome needs another decision first: the later writes may depend on a fact that
                # has turned out to be wrong.
                if error.outcome.kind != "not-admitted":
                    return error.outcome
                failed.append(write)
                refused += error.outcome.refused
        if late and not refused:
            raise UnavailableError(f"writes take more than {ACT_SECONDS:g} s; the next pass continues")
        if refused:
            # A pod is created last, and nothing depends on it. Without any other object the attempt must not
            # be recorded.
            created = not late and not any(_is_creation(write) and _kind_of(write) != POD.kind for write in failed)
            return Outcome("not-admitted", refused[0].text, refused=tuple(refused), created=created)
        return DONE

    async def _make_write(self, namespace: str, write: Write) -> None:
        match write:
            case Grow():
                await self._grow_claim(namespace, write)
            case CheckSecret():
                await self._check_secret(write.manifest)
            case DryRun():
                await self._dry_run(write.manifest)
            case Create():
                await self._create_object(write.manifest)
            case Apply():
                await self._apply_object(write)
            case Annotate():
                await self._annotate_object(namespace, write)
            case Scale():
                await self._scale_object(namespace, write)
            case Delete():
                await self._delete_object(namespace, write)
            case Disown():
                await self._disown_object(namespace, write)

    async def is_taken(self, manifest: Manifest) -> bool:
        """Return whether a foreign object has a child's name."""
        try:
            await self._find_own(manifest)
        except _StopError:
            return True
        return False

    async def _grow_claim(self, namespace: str, grow: Grow) -> None:
        """Enlarge a claim; not-grown if the API server refuses, stale if the claim has changed since the observation."""
        # The version is a precondition: a user may have changed the claim since the observation.
        preconditions = {"uid": grow.uid} | ({} if grow.version is None else {"resourceVersion": grow.version})
        patch = {"metadata": preconditions, "spec": {"resources": {"requests": {"storage": grow.size}}}}
        try:
            self._store_response(await self._client.merge_patch(CLAIM, namespace, grow.claim, patch))
        except ApiError as error:
            found = await self._client.get(CLAIM, namespace, grow.claim)
            if found is not None and preconditions.items() <= found["metadata"].items():
                refused = Refusal(Ref(CLAIM.kind, grow.claim), error.message, kind="not-grown", grow=grow)
                raise _StopError(Outcome("not-grown", error.message, refused=(refused,))) from error
            if found is None or found["metadata"]["uid"] != grow.uid:
                self._store.remove(CLAIM.kind, namespace, grow.claim, grow.uid)
            if found is not None:
                self._store_response({**found, "apiVersion": CLAIM.api_version, "kind": CLAIM.kind})
            raise _stale_outcome(f"claim {grow.claim} {'has changed' if found is not None else 'is gone'}") from error

    async def _dry_run(self, manifest: Manifest) -> None:
        try:
            await self._classify_refusal(manifest, self._client.apply(_without_account(manifest), dry_run=True))
        except _StopError as error:
            if error.outcome.kind == "invalid":
                await self._find_own(manifest)  # a foreign object of this name may be the reason
                raise
            if not error.outcome.refused[0].quota:
                raise

    async def _check_secret(self, secret: Manifest) -> None:
        """Check by a dry-run create whether a Secret exists; key-lost if it could be created. If the dry run is refused, it is unknown."""
        ref = Ref(secret["kind"], secret["metadata"]["name"])
        try:
            # The operator may not read Secrets. A dry-run create shows whether the name is free.
            lost = await self._client.create(secret, dry_run=True) is not None
        except ApiError as error:
            if error.is_withheld or error.refused:
                raise _kept_out(ref, error, ASKED) from error
            log.debug("the existence of %s cannot be checked: %s", _describe_object(secret), error)
            return
        if lost:
            raise _StopError(Outcome("key-lost", refused=(Refusal(ref, "", kind="key-lost"),)))

    async def _create_object(self, manifest: Manifest) -> None:
        # An existing object is read, because the cache may not contain it yet, and because it may be foreign.
        made = await self._classify_refusal(manifest, self._client.create(manifest))
        self._store_response(made)
        if (
            made is None and manifest["kind"] != SECRET.kind
        ):  # the operator can read none, and its name holds the run's UID
            self._store_response(await self._find_own(manifest))

    async def _apply_object(self, item: Apply) -> None:
        # Never apply over an unknown object: an apply with force takes it over, and its deletion follows that of the run.
        expected = item.replaces or (ABSENT if item.expect_absent else None)
        if await self._applied_over(item.manifest, expected or item.known or ABSENT):
            return
        # The precondition failed: the object is unknown, foreign, changed, or was deleted meanwhile. One read
        # distinguishes these.
        found = await self._find_own(item.manifest)
        if found is None:
            if not await self._applied_over(item.manifest, ABSENT):
                raise _stale_outcome(f"{_describe_object(item.manifest)} has appeared")
        elif expected is not None:
            self._store_response(found)
            raise _stale_outcome(
                f"{_describe_object(item.manifest)} {'has changed' if item.replaces else 'exists already'}"
            )
        else:
            self._store_response(
                await self._classify_refusal(item.manifest, self._client.apply(item.manifest)), applied=True
            )

    async def _applied_over(self, manifest: Manifest, version: str) -> bool:
        made = await self._classify_refusal(manifest, self._client.apply_over(manifest, version))
        self._store_response(made, applied=True)
        return made is not None

    async def _find_own(self, manifest: Manifest) -> Manifest | None:
        """Return the object with a child's name, or None; name-taken if no run of this name made it, neither this run nor a deleted one."""
        resource, namespace, name = address_of(manifest)
        found = await self._client.get(resource, namespace, name)
        if found is None:
            return None
        if not _is_own(found, manifest):
            refused = Refusal(Ref(resource.kind, name), "", kind="name-taken")
            raise _StopError(Outcome("name-taken", child=manifest, refused=(refused,)))
        return {**found, "apiVersion": resource.api_version, "kind": resource.kind}

    async def _annotate_object(self, namespace: str, annotate: Annotate) -> None:
        """Annotate an object; a deleted or replaced object is left out."""
        patch = {"metadata": {"uid": annotate.uid, "annotations": dict(annotate.annotations)}}
        try:
            self._store_response(
                await self._client.merge_patch(BY_KIND[annotate.ref.kind], namespace, annotate.ref.name, patch)
            )
        except ApiError as error:
            if error.is_withheld:
                raise _kept_out(annotate.ref, error, "be annotated") from error
            if error.status not in (404, 409, 422):  # 409, 422: the UID of a living object cannot be changed
                raise
            if error.status == 422 and await self._is_there(namespace, annotate):
                raise _kept_out(annotate.ref, error, "be annotated") from error
            log.debug("%s was not annotated: %s", annotate.ref, error)

    async def _is_there(self, namespace: str, annotate: Annotate) -> bool:
        """Return whether exactly this object still exists."""
        found = await self._client.get(BY_KIND[annotate.ref.kind], namespace, annotate.ref.name)
        return found is not None and found["metadata"]["uid"] == annotate.uid

    async def _scale_object(self, namespace: str, scale: Scale) -> None:
        resource, name = BY_KIND[scale.ref.kind], scale.ref.name
        try:
            self._store_response(await self._client.scale(resource, namespace, name, scale.replicas, uid=scale.uid))
        except ApiError as error:
            if error.is_withheld:
                raise _kept_out(scale.ref, error, f"be scaled to {scale.replicas}") from error
            if error.status not in (404, 422):  # 422: the UID of a living object cannot be changed
                raise
            # The API server reports a wrong UID like an invalid field, so the object is read to distinguish a
            # successor from a refusal.
            found = await self._client.get(resource, namespace, name) if error.status == 422 else None
            if found is not None and found["metadata"]["uid"] == scale.uid:
                raise _kept_out(scale.ref, error, f"be scaled to {scale.replicas}") from error
            # The watch may report the deletion late. Until then each decision would scale the same deleted
            # object.
            self._store.remove(resource.kind, namespace, name, scale.uid)
            if found is not None:
                self._store_response({**found, "apiVersion": resource.api_version, "kind": resource.kind})
            raise _stale_outcome(
                f"{resource.kind} {name} {'is gone' if found is None else 'is another one'}"
            ) from error

    async def _disown_object(self, namespace: str, disown: Disown) -> None:
        preconditions = {"uid": disown.uid} | ({} if disown.version is None else {"resourceVersion": disown.version})
        patch = {"metadata": {**preconditions, "ownerReferences": list(disown.owners)}}
        try:
            self._store_response(await self._client.merge_patch(CLAIM, namespace, disown.claim, patch))
        except ApiError as error:
            if error.is_withheld:
                raise _kept_out(Ref(CLAIM.kind, disown.claim), error, "be kept") from error
            if error.status not in (404, 409, 422):  # it has changed or was replaced: the watch reports it
                raise
            log.debug("claim %s keeps its owner, because it has changed: %s", disown.claim, error)

    async def _delete_object(self, namespace: str, delete: Delete) -> None:
        try:
            answer = await self._client.delete(
                BY_KIND[delete.ref.kind],
                namespace,
                delete.ref.name,
                uid=delete.uid,
                grace_seconds=delete.grace_seconds,
            )
        except ApiError as error:
            if error.is_withheld:
                raise _kept_out(delete.ref, error, "be deleted") from error
            raise
        # With a grace period or a finalizer the object still exists; without them the answer is a Status.
        if answer is not None and answer.get("kind") == delete.ref.kind:
            self._store_response(answer)  # the object is being deleted: it has a deletionTimestamp now
        else:
            self._store.remove(delete.ref.kind, namespace, delete.ref.name, delete.uid)

    async def _classify_refusal(self, manifest: Manifest, call: Awaitable[Manifest | None]) -> Manifest | None:
        try:
            return await call
        except ApiError as error:
            if error.is_withheld or limit_was_filled_in(error.message, manifest) or _is_fixed(error, manifest):
                raise _kept_out(Ref(manifest["kind"], manifest["metadata"]["name"]), error) from error
            if error.refused:
                causes = refusal_causes(error.message, error.details)
                refused = Refusal(Ref(manifest["kind"], manifest["metadata"]["name"]), error.message, kind="invalid")
                raise _StopError(Outcome("invalid", error.message, manifest, causes, (refused,))) from error
            raise

    def _store_response(self, manifest: Manifest | None, *, applied: bool = False) -> None:
        if manifest is not None and manifest.get("kind") in _KEPT:
            self._store.put(manifest, self._now(), applied=applied)


def _depends_on_failed(write: Write, failed: Sequence[Write]) -> bool:
    """Return whether a write has to wait for one that was refused.

    Nothing is created if a dry run was refused. Pods mount and read the parts, which also protect them: a workload waits for all parts, and
    for the workloads that it works with.
    """
    if not _is_creation(write):
        return False
    if any(isinstance(each, DryRun) for each in failed):
        return True
    needs = _WORKS_WITH.get(_kind_of(write)) if isinstance(write, Apply) else None
    if needs is None:
        return False
    kinds = [_kind_of(each) for each in failed if _is_creation(each)]
    return any(kind not in _WORKS_WITH or kind in needs for kind in kinds)


def _is_creation(write: Write) -> bool:
    """Return whether a write creates or updates an object that the attempt needs."""
    return isinstance(write, (DryRun, Create)) or (isinstance(write, Apply) and not write.repairs)


def _kind_of(write: Write) -> str:
    return str(write.manifest["kind"]) if isinstance(write, (Create, Apply)) else ""


def _is_fixed(error: ApiError, manifest: Manifest) -> bool:
    """Return whether a refusal is caused by immutable fields of an existing object, not by the specification. Pods are never changed."""
    return error.refused and manifest["kind"] != POD.kind and is_fixed(error.message)


def _kept_out(ref: Ref, error: ApiError, doing: str = MADE) -> _StopError:
    refused = Refusal(ref, error.message, doing, quota=error.over_quota)
    return _StopError(Outcome("not-admitted", error.message, refused=(refused,)))


def _stale_outcome(difference: str) -> _StopError:
    return _StopError(Outcome("stale", difference))


def _is_own(found: Manifest, manifest: Manifest) -> bool:
    """Return whether an existing object was created for a run with the same name as `manifest`. Any client may copy a label."""
    metadata = found["metadata"]
    made_for, run = ((each["metadata"].get("labels") or {}).get(RUN_LABEL) for each in (found, manifest))
    if made_for != run:
        return False
    if manifest["kind"] == CLAIM.kind:  # a claim outlives its run, and then only has the label
        return True
    if not manifest["metadata"].get("ownerReferences") or is_made_for(metadata, str(run)):
        return True
    return any(entry.get("manager") == MANAGER for entry in metadata.get("managedFields") or ())


def _describe_object(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _without_account(manifest: Manifest) -> Manifest:
    """Return a Pod for a dry run without its ServiceAccount, which is created later and is not part of the user's template."""
    if manifest["kind"] != POD.kind:
        return manifest
    spec = {name: value for name, value in manifest["spec"].items() if name != "serviceAccountName"}
    return {**manifest, "spec": spec}
