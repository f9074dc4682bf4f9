"""Carries out a decision: ask, dry-run, create, apply, annotate, scale, delete, repair, in this order.

The answers go into the store at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun_operator.kube.client import ABSENT, ApiError, Client, UnavailableError, address_of
from rlrun_operator.kube.resources import BY_KIND, CLAIM, DEPLOYMENT, POD, SECRET, STATEFUL_SET, WATCHED
from rlrun_operator.names import MANAGER, RUN_LABEL, Ref, is_made_for
from rlrun_operator.render.origin import Cause, refusal_causes
from rlrun_operator.runtime.cache import Store
from rlrun_operator.state import MADE, Annotate, Apply, Decision, Delete, Disown, Grow, Manifest, Refusal, Scale
from rlrun_operator.status.admission_limits import is_fixed, limit_was_filled_in

_KEPT = {resource.kind for resource in WATCHED}
_WORKS_WITH = {
    STATEFUL_SET.kind: frozenset[str](),
    DEPLOYMENT.kind: frozenset({STATEFUL_SET.kind}),
    POD.kind: frozenset({STATEFUL_SET.kind, DEPLOYMENT.kind}),
}
"""Workloads, each with those that are made before it. An attempt is made in this order, so that no GPU waits for what is refused."""
ACT_SECONDS = 30.0
"""Time in which the writes of a decision begin. Where webhooks let each take seconds, those of an attempt's beginning take minutes."""
ASKED = "be looked for"
"""A write that changes nothing: the question whether a Secret is there."""
log = logging.getLogger(__name__)


OutcomeKind = Literal["done", "not-admitted", "invalid", "name-taken", "key-lost", "stale"]
"""Result of the writes of a decision:

- done: every write was made.
- not-admitted: a quota, another admission check or a missing permission refuses some writes, and a retry may help. All writes that do not
  depend on them were made.
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


class _LateError(Exception):
    """The time of a decision is over; the next pass makes the remaining writes."""


class _Gate:
    """Writes of one decision, one after the other.

    Args:
        until: no write begins later (`clock`): each may wait for a webhook, and the operator for none of them too long.
    """

    def __init__(self, clock: Callable[[], float], until: float) -> None:
        self.refused: list[Refusal] = []
        self._clock = clock
        self._until = until

    async def let_in(self, work: Coroutine[object, object, None]) -> bool:
        """Do some work; False, and one more refusal: admission does not let it in.

        Raises:
            _LateError: nothing was begun.
        """
        if self._clock() >= self._until:
            work.close()
            raise _LateError
        try:
            await work
        except _StopError as error:
            if error.outcome.kind != "not-admitted":
                raise
            self.refused += error.outcome.refused
            return False
        return True


class Applier:
    """Writes to the cluster.

    Args:
        now: seconds since the epoch.
        clock: steady seconds.
    """

    def __init__(self, client: Client, store: Store, now: Callable[[], float], clock: Callable[[], float]) -> None:
        self._client = client
        self._store = store
        self._now = now
        self._clock = clock

    async def act(self, namespace: str, decision: Decision) -> Outcome:
        """Make all writes of a decision except its status and events. A refused write stops only the writes that depend on it.

        Raises:
            ApiError, UnavailableError: the pass has to be retried; also if the writes take longer than `ACT_SECONDS`.
        """
        gate, made = _Gate(self._clock, self._clock() + ACT_SECONDS), False
        try:
            if decision.ask is not None:
                await gate.let_in(self._ask(decision.ask))
            made = await self._make(decision, gate)
            await self._change(namespace, decision, gate)
        except _StopError as error:
            return error.outcome
        except _LateError:
            if not gate.refused:
                raise UnavailableError(f"writes take more than {ACT_SECONDS:g} s; the next pass goes on") from None
            made = False
        if gate.refused:
            return Outcome("not-admitted", gate.refused[0].text, refused=tuple(gate.refused), created=made)
        return DONE

    async def _change(self, namespace: str, decision: Decision, gate: _Gate) -> None:
        """Change what exists."""
        for annotate in decision.annotate:
            await gate.let_in(self._annotate(namespace, annotate))
        for scale in decision.scale:
            await gate.let_in(self._scale(namespace, scale))
        for delete in decision.delete:
            await gate.let_in(self._delete(namespace, delete))
        if decision.disown is not None:
            await gate.let_in(self._disown(namespace, decision.disown))
        for item in decision.repair:
            await gate.let_in(self._apply(item))

    async def _make(self, decision: Decision, gate: _Gate) -> bool:
        """Dry-run, create and apply; False: something else than a pod is not let in.

        Pods mount, read and are guarded by what is made before them: a workload waits for all of that, and for the workloads that it
        works with.
        """
        for manifest in decision.dry_run:
            if not await gate.let_in(self._try(manifest)):
                return False
        ready = True
        for manifest in decision.create:
            ready &= await gate.let_in(self._create(manifest))
        lacking: set[str] = set()
        for item in decision.apply:
            kind = item.manifest["kind"]
            if kind in _WORKS_WITH and (not ready or lacking & _WORKS_WITH[kind]):
                continue
            if not await gate.let_in(self._apply(item)):
                lacking.add(kind)
                ready &= kind in _WORKS_WITH
        return ready and lacking <= {POD.kind}

    async def is_taken(self, manifest: Manifest) -> bool:
        """True if a foreign object has a child's name."""
        try:
            await self._find_own(manifest)
        except _StopError:
            return True
        return False

    async def grow(self, namespace: str, grow: Grow) -> Outcome:
        """Enlarge a claim; not-admitted if the API server refuses, stale if the claim has changed since the observation.

        Raises:
            UnavailableError: the pass has to be retried.
        """
        preconditions = {"uid": grow.uid} | ({} if grow.version is None else {"resourceVersion": grow.version})
        patch = {"metadata": preconditions, "spec": {"resources": {"requests": {"storage": grow.size}}}}
        try:
            self._learn(await self._client.merge(CLAIM, namespace, grow.claim, patch))
        except ApiError as error:
            found = await self._client.get(CLAIM, namespace, grow.claim)
            if found is not None and preconditions.items() <= found["metadata"].items():
                refused = Refusal(Ref(CLAIM.kind, grow.claim), error.message, kind="not-grown", grow=grow)
                return Outcome("not-admitted", error.message, refused=(refused,))
            if found is None or found["metadata"]["uid"] != grow.uid:
                self._store.remove(CLAIM.kind, namespace, grow.claim, grow.uid)
            if found is not None:
                self._learn({**found, "apiVersion": CLAIM.api_version, "kind": CLAIM.kind})
            return Outcome("stale", f"claim {grow.claim} {'has changed' if found is not None else 'is gone'}")
        return DONE

    async def _try(self, manifest: Manifest) -> None:
        try:
            await self._judged(manifest, self._client.apply(_without_account(manifest), dry_run=True))
        except _StopError as error:
            if error.outcome.kind == "invalid":
                await self._find_own(manifest)  # a foreign object of this name may be the reason
                raise
            if not error.outcome.refused[0].quota:
                raise

    async def _ask(self, secret: Manifest) -> None:
        """Check by a dry-run create whether a Secret exists; key-lost if it could be created. If the dry run is refused, it is unknown."""
        ref = Ref(secret["kind"], secret["metadata"]["name"])
        try:
            lost = await self._client.create(secret, dry_run=True) is not None
        except ApiError as error:
            if error.withheld or error.refused:
                raise _kept_out(ref, error, ASKED) from error
            log.debug("whether %s is there cannot be asked: %s", _describe_object(secret), error)
            return
        if lost:
            raise _StopError(Outcome("key-lost", refused=(Refusal(ref, "", kind="key-lost"),)))

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
                raise _stale(f"{_describe_object(item.manifest)} has appeared")
        elif expected is not None:
            self._learn(found)
            raise _stale(f"{_describe_object(item.manifest)} {'has changed' if item.replaces else 'exists already'}")
        else:
            self._learn(await self._judged(item.manifest, self._client.apply(item.manifest)), applied=True)

    async def _applied_over(self, manifest: Manifest, version: str) -> bool:
        made = await self._judged(manifest, self._client.apply_over(manifest, version))
        self._learn(made, applied=True)
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

    async def _annotate(self, namespace: str, annotate: Annotate) -> None:
        """Annotate an object; one that is gone, or is another one now, needs it no more."""
        patch = {"metadata": {"uid": annotate.uid, "annotations": dict(annotate.annotations)}}
        try:
            self._learn(await self._client.merge(BY_KIND[annotate.ref.kind], namespace, annotate.ref.name, patch))
        except ApiError as error:
            if error.withheld:
                raise _kept_out(annotate.ref, error, "be annotated") from error
            if error.status not in (404, 409, 422):  # 409, 422: the UID of a living object cannot be changed
                raise
            if error.status == 422 and await self._is_there(namespace, annotate):
                raise _kept_out(annotate.ref, error, "be annotated") from error
            log.debug("%s was not annotated: %s", annotate.ref, error)

    async def _is_there(self, namespace: str, annotate: Annotate) -> bool:
        """True if the very object that was to be annotated exists."""
        found = await self._client.get(BY_KIND[annotate.ref.kind], namespace, annotate.ref.name)
        return found is not None and found["metadata"]["uid"] == annotate.uid

    async def _scale(self, namespace: str, scale: Scale) -> None:
        resource, name = BY_KIND[scale.ref.kind], scale.ref.name
        try:
            self._learn(await self._client.scale(resource, namespace, name, scale.replicas, uid=scale.uid))
        except ApiError as error:
            if error.withheld:
                raise _kept_out(scale.ref, error, f"be scaled to {scale.replicas}") from error
            if error.status not in (404, 422):  # 422: the UID of a living object cannot be changed
                raise
            found = await self._client.get(resource, namespace, name) if error.status == 422 else None
            if found is not None and found["metadata"]["uid"] == scale.uid:
                raise _kept_out(scale.ref, error, f"be scaled to {scale.replicas}") from error
            self._store.remove(resource.kind, namespace, name, scale.uid)
            if found is not None:
                self._learn({**found, "apiVersion": resource.api_version, "kind": resource.kind})
            raise _stale(f"{resource.kind} {name} {'is gone' if found is None else 'is another one'}") from error

    async def _disown(self, namespace: str, disown: Disown) -> None:
        preconditions = {"uid": disown.uid} | ({} if disown.version is None else {"resourceVersion": disown.version})
        patch = {"metadata": {**preconditions, "ownerReferences": list(disown.owners)}}
        try:
            self._learn(await self._client.merge(CLAIM, namespace, disown.claim, patch))
        except ApiError as error:
            if error.withheld:
                raise _kept_out(Ref(CLAIM.kind, disown.claim), error, "be kept") from error
            if error.status not in (404, 409, 422):  # it has changed, or is another one: the watch brings it
                raise
            log.debug("claim %s keeps its owner: %s", disown.claim, error)

    async def _delete(self, namespace: str, delete: Delete) -> None:
        try:
            answer = await self._client.delete(
                BY_KIND[delete.ref.kind],
                namespace,
                delete.ref.name,
                uid=delete.uid,
                grace_seconds=delete.grace_seconds,
            )
        except ApiError as error:
            if error.withheld:
                raise _kept_out(delete.ref, error, "be deleted") from error
            raise
        if answer is not None and answer.get("kind") == delete.ref.kind:
            self._learn(answer)  # ending: it carries a deletionTimestamp now
        else:
            self._store.remove(delete.ref.kind, namespace, delete.ref.name, delete.uid)

    async def _judged(self, manifest: Manifest, call: Awaitable[Manifest | None]) -> Manifest | None:
        try:
            return await call
        except ApiError as error:
            if error.withheld or limit_was_filled_in(error.message, manifest) or _is_fixed(error, manifest):
                raise _kept_out(Ref(manifest["kind"], manifest["metadata"]["name"]), error) from error
            if error.refused:
                causes = refusal_causes(error.message, error.details)
                refused = Refusal(Ref(manifest["kind"], manifest["metadata"]["name"]), error.message, kind="invalid")
                raise _StopError(Outcome("invalid", error.message, manifest, causes, (refused,))) from error
            raise

    def _learn(self, manifest: Manifest | None, *, applied: bool = False) -> None:
        if manifest is not None and manifest.get("kind") in _KEPT:
            self._store.put(manifest, self._now(), applied=applied)


def _is_fixed(error: ApiError, manifest: Manifest) -> bool:
    """True if an object that exists cannot be changed to this one, whatever the specification says. Pods are never changed."""
    return error.refused and manifest["kind"] != POD.kind and is_fixed(error.message)


def _kept_out(ref: Ref, error: ApiError, doing: str = MADE) -> _StopError:
    refused = Refusal(ref, error.message, doing, quota=error.over_quota)
    return _StopError(Outcome("not-admitted", error.message, refused=(refused,)))


def _stale(difference: str) -> _StopError:
    return _StopError(Outcome("stale", difference))


def _is_own(found: Manifest, manifest: Manifest) -> bool:
    """True if what exists was made for a run of the name that `manifest` is made for. Any client may copy a label."""
    metadata = found["metadata"]
    made_for, run = ((each["metadata"].get("labels") or {}).get(RUN_LABEL) for each in (found, manifest))
    if made_for != run:
        return False
    if manifest["kind"] == CLAIM.kind:  # it outlives its run, and has the label alone then
        return True
    if not manifest["metadata"].get("ownerReferences") or is_made_for(metadata, str(run)):
        return True
    return any(entry.get("manager") == MANAGER for entry in metadata.get("managedFields") or ())


def _describe_object(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _without_account(manifest: Manifest) -> Manifest:
    """A Pod as it can be dry-run: its ServiceAccount is made later, and is not what the user's template is judged by."""
    if manifest["kind"] != POD.kind:
        return manifest
    spec = {name: value for name, value in manifest["spec"].items() if name != "serviceAccountName"}
    return {**manifest, "spec": spec}
