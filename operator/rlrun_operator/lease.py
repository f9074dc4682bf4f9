"""Leader election by a Lease, with the times of Kubernetes' own components: at most one operator acts at a time.

A leader that cannot renew stops acting after `RENEW_SECONDS`, well before another may take over after `DURATION_SECONDS`. It goes on
by itself when the API server is back and nobody took over; it ends when another process leads. Clocks of others are not compared:
a Lease has expired when this process saw no renewal for its whole duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlrun_operator.client import ApiError, Client, UnavailableError
from rlrun_operator.names import MANAGER
from rlrun_operator.resources import LEASE

DURATION_SECONDS = 15
RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0
REQUEST_SECONDS = 4.0
log = logging.getLogger(__name__)


class LeadershipLostError(Exception):
    """Another process leads; this one has to end, so that nothing of its state is used again."""


class NotLeadingError(Exception):
    """A write was not made, because this process does not lead (any more)."""


@dataclass
class _Seen:
    """The Lease as this process saw it last."""

    record: Mapping[str, Any]
    changed_at: float
    """When this process saw it change (steady clock)."""


class Leader:
    """One candidate.

    Args:
        namespace: of the Lease.
        name: of the Lease. Operators of one release share it; two releases in one namespace must not.
        identity: of this process, unique.
        on_start: called each time that this process begins to act, or begins again after an outage.
        on_pause: called when it cannot renew and must not act.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        identity: str,
        *,
        name: str = MANAGER,
        on_start: Callable[[], Awaitable[None]],
        on_pause: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._name = name
        self._on_start = on_start
        self._on_pause = on_pause
        self._clock = clock
        self._seen: _Seen | None = None
        self._renewed_at: float | None = None
        self._acting = False
        self._led_before = False
        self._told: str | None = None

    @property
    def stands_by(self) -> str | None:
        """The process that leads in place of this one; None: nobody that this one has seen."""
        return self._told

    def is_leading(self) -> bool:
        """Whether this process may act now; false in time even if the event loop stood still or the process was frozen."""
        return self._acting and self._renewed_at is not None and self._clock() - self._renewed_at < RENEW_SECONDS

    def check(self) -> None:
        """Raises NotLeadingError unless this process may act."""
        if not self.is_leading():
            raise NotLeadingError("this operator does not lead")

    async def run(self) -> None:
        """Take part in the election until cancelled.

        Raises:
            LeadershipLostError: another process leads, after this one did.
        """
        while True:
            await self.step()
            await asyncio.sleep(RETRY_SECONDS)

    async def step(self) -> None:
        """One attempt to acquire or renew.

        Raises:
            LeadershipLostError: see `run`.
        """
        asked_at = self._clock()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                holds = await self._acquire_or_renew()
        except (UnavailableError, TimeoutError) as error:
            log.debug("leader Lease: %s", error)
            holds = None
        except ApiError as error:
            log.warning("leader Lease %s/%s cannot be written: %s", self._namespace, self._name, error)
            holds = None
        if holds is False and self._told != self._holder():
            log.info("standing by: %s leads (Lease %s/%s)", self._holder(), self._namespace, self._name)
        if holds is not None:
            self._told = None if holds else self._holder()
        if holds:
            self._renewed_at = asked_at  # the time before the request: never later than what the API server noted
            if not self._acting:
                log.info("leading%s", " again after an outage of the API server" if self._led_before else "")
                self._acting = self._led_before = True
                await self._on_start()
            return
        if holds is False and self._led_before:
            self._acting = False
            raise LeadershipLostError(f"{self._holder()} leads now; this process ends and starts anew as its stand-by")
        if self._acting and not self._still_fresh():
            log.warning("the leader Lease could not be renewed for %g s; not acting until it can", RENEW_SECONDS)
            self._acting = False
            await self._on_pause()

    async def release(self) -> None:
        """Let the next candidate take over at once. Best effort; call it when nothing acts any more."""
        if self._seen is None or not self.is_leading():
            return
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time()}
        version = self._seen.record["metadata"]["resourceVersion"]
        try:
            async with asyncio.timeout(REQUEST_SECONDS / 2):
                await self._patch(version, spec)
        except (ApiError, UnavailableError, TimeoutError) as error:
            log.info("the leader Lease was not released, it expires in %d s: %s", DURATION_SECONDS, error)
        self._acting = False

    def _still_fresh(self) -> bool:
        """Whether the next attempt would end in time."""
        return self._renewed_at is not None and self._clock() - self._renewed_at + RETRY_SECONDS < RENEW_SECONDS

    def _holder(self) -> str:
        return str((self._seen.record.get("spec") or {}).get("holderIdentity")) if self._seen else ""

    async def _acquire_or_renew(self) -> bool:
        """Whether this process holds the Lease now."""
        record = await self._client.get(LEASE, self._namespace, self._name)
        if record is None:
            created = await self._client.request(
                "POST", "create", LEASE.plural, LEASE.path(self._namespace), body=self._manifest()
            )
            self._look(created)
            return True
        self._look(record)
        spec = record.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        mine = holder == self._identity
        if holder and not mine and not self._expired(spec):
            return False
        change: dict[str, Any] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": _micro_time(),
        }
        if not mine:
            change |= {
                "acquireTime": change["renewTime"],
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1,
            }
        try:
            self._look(await self._patch(record["metadata"]["resourceVersion"], change))
        except ApiError as error:
            if error.status == 409:  # another candidate was faster, or our own last attempt arrived after all
                return False if not mine else await self._acquire_or_renew()
            raise
        return True

    async def _patch(self, version: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        # Not `Client.merge`: that asks whether this process leads.
        return await self._client.request(
            "PATCH",
            "patch",
            LEASE.plural,
            LEASE.path(self._namespace, self._name),
            body={"metadata": {"resourceVersion": version}, "spec": spec},
            content="application/merge-patch+json",
        )

    def _look(self, record: Mapping[str, Any]) -> None:
        if self._seen is None or self._seen.record.get("spec") != record.get("spec"):
            self._seen = _Seen(record, self._clock())
        else:
            self._seen.record = record

    def _expired(self, spec: Mapping[str, Any]) -> bool:
        duration = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        return self._seen is None or self._clock() - self._seen.changed_at > duration

    def _manifest(self) -> dict[str, Any]:
        now = _micro_time()
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {"app.kubernetes.io/name": "rlrun", "app.kubernetes.io/managed-by": MANAGER},
            },
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": DURATION_SECONDS,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
