"""Leader election by a Lease, with the times of Kubernetes' own components: at most one operator acts at a time.

A leader that cannot renew stops acting after `RENEW_SECONDS`, well before another may take over after `DURATION_SECONDS`. It goes on
by itself when the API server is back and no other took over; it ends when another process leads. Clocks of others are not compared:
a Lease has expired when this process saw no renewal for its whole duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.lease_lock import LeaseLock
from rlrun_operator.names import MANAGER

DURATION_SECONDS = 15
RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0
REQUEST_SECONDS = 4.0
log = logging.getLogger(__name__)


class LeadershipLostError(Exception):
    """Another process leads; this one has to end, so that nothing of its state is used again."""


class NotLeadingError(Exception):
    """A write was not made, because this process does not lead (any more)."""


class Leader:
    """One candidate.

    Args:
        namespace: of the Lease.
        name: of the Lease. Operators of one release share it; two releases in one namespace must not.
        identity: of this process, unique.
        on_start: called each time that this process begins to act, or begins again after an outage.
        on_pause: called when it cannot renew and must not act.
        on_rewound: called when the Lease is older than it was: etcd was restored from a backup.
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
        on_rewound: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = f"Lease {namespace}/{name}"
        self._lock = LeaseLock(client, namespace, name, identity, duration=DURATION_SECONDS, clock=clock)
        self._on_start = on_start
        self._on_pause = on_pause
        self._on_rewound = on_rewound
        self._clock = clock
        self._renewed_at: float | None = None
        self._acting = False
        self._led_before = False
        self._told: str | None = None

    @property
    def stands_by(self) -> str | None:
        """The process that leads in place of this one; None: none that this one has seen."""
        return self._told

    @property
    def acts(self) -> bool:
        """True between `on_start` and the next `on_pause`, also in a moment in which a renewal is late: `check` keeps that from writing."""
        return self._acting

    def is_leading(self) -> bool:
        """True if this process may act now; false in time even if the event loop stood still or the process was frozen."""
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
                holds = await self._lock.acquire_or_renew()
        except (UnavailableError, TimeoutError) as error:
            log.debug("leader Lease: %s", error)
            holds = None
        except ApiError as error:
            log.warning("the leader's %s cannot be written: %s", self._what, error)
            holds = None
        if self._lock.take_rewound():
            log.warning("%s is older than it was: etcd was restored; everything is read again", self._what)
            self._on_rewound()
        if holds is False and self._told != self._lock.holder:
            log.info("standing by: %s leads (%s)", self._lock.holder, self._what)
        if holds is not None:
            self._told = None if holds else self._lock.holder
        if holds:
            self._renewed_at = asked_at  # the time before the request: never later than what the API server noted
            if not self._acting:
                log.info("leading%s", " again after an outage of the API server" if self._led_before else "")
                self._acting = self._led_before = True
                await self._on_start()
            return
        if holds is False and self._led_before:
            self._acting = False
            raise LeadershipLostError(
                f"{self._lock.holder} leads now; this process ends and starts anew as its stand-by"
            )
        if self._acting and not self._still_fresh():
            log.warning("the leader Lease could not be renewed for %g s; not acting until it can", RENEW_SECONDS)
            self._acting = False
            await self._on_pause()

    async def release(self) -> None:
        """Let the next candidate take over at once. Best effort; call it when nothing acts any more."""
        if not self.is_leading():
            return
        try:
            async with asyncio.timeout(REQUEST_SECONDS / 2):
                await self._lock.release()
        except (ApiError, UnavailableError, TimeoutError) as error:
            log.info("the leader Lease was not released, it expires in %d s: %s", DURATION_SECONDS, error)
        self._acting = False

    def _still_fresh(self) -> bool:
        """True if the next attempt would end in time."""
        return self._renewed_at is not None and self._clock() - self._renewed_at + RETRY_SECONDS < RENEW_SECONDS
