"""Leases of the operator: leader election, and one operator per namespace.

At most one process of a release acts at a time. The leader Lease has the times of Kubernetes' own components. A leader that cannot renew
stops acting after `LEADER_RENEW_SECONDS`, well before another one may take over after `LEADER_DURATION_SECONDS`. It continues when the API
server is back and no other process has taken over; otherwise it ends. Clocks of other machines are not compared: a Lease has expired if
this process saw no renewal for its whole duration.

Releases have separate leader Leases and do not see each other; two releases that are configured for one namespace would both act on its
runs. Therefore each namespace with runs has a Lease that names the release that serves them. A leader acquires it before it acts in the
namespace, and keeps renewing it. The holder is the release, not its process: an upgrade or a restart does not transfer the runs. The Lease
is never released: after an uninstallation, another release takes over after `TERRITORY_DURATION_SECONDS`. Runs that name their operator
(`managedBy`) have a separate Lease, so that operators of different names can share a namespace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.lease_lock import LeaseLock
from rlrun_operator.names import MANAGER, SERVED_LEASE

LEADER_DURATION_SECONDS = 15
LEADER_RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0
REQUEST_SECONDS = 4.0
log = logging.getLogger(__name__)


class LeadershipLostError(Exception):
    """Another process leads; this process must end, so that its outdated state is not used again."""


class NotLeadingError(Exception):
    """A write was refused locally, because this process does not lead (any more)."""


class Leader:
    """Candidate for the leadership.

    Args:
        client: client of the API server.
        namespace: namespace of the Lease.
        identity: unique identity of this process.
        name: name of the Lease. Operators of one release share it; two releases in one namespace must not.
        on_start: callback each time this process starts to act, also after an outage.
        on_pause: callback when it cannot renew and must stop acting.
        on_rewound: callback when the Lease is older than before: etcd was restored from a backup.
        clock: steady seconds.
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
        self._lock = LeaseLock(client, namespace, name, identity, duration=LEADER_DURATION_SECONDS, clock=clock)
        self._on_start = on_start
        self._on_pause = on_pause
        self._on_rewound = on_rewound
        self._clock = clock
        self._renewed_at: float | None = None
        self._acting = False
        self._led_before = False
        self._other_leader: str | None = None

    @property
    def stands_by(self) -> str | None:
        """The process that leads instead of this one, or None if this process has seen no other leader."""
        return self._other_leader

    @property
    def is_acting(self) -> bool:
        """Whether it is between `on_start` and the next `on_pause`, even while a renewal is late; `check_leading` then refuses writes."""
        return self._acting

    def is_leading(self) -> bool:
        """Return whether this process may act now; False in time even after a blocked event loop or a frozen process."""
        return self._acting and self._renewed_at is not None and self._clock() - self._renewed_at < LEADER_RENEW_SECONDS

    def check_leading(self) -> None:
        """Raise NotLeadingError unless this process may act."""
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
        """Try once to acquire or renew the Lease.

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
            log.warning("cannot write the leader's %s: %s", self._what, error)
            holds = None
        if self._lock.take_rewound():
            log.warning(
                "%s is older than before, so etcd was restored; the operator reads all objects again", self._what
            )
            self._on_rewound()
        if holds is False and self._other_leader != self._lock.holder:
            log.info("standing by: %s leads (%s)", self._lock.holder, self._what)
        if holds is not None:
            self._other_leader = None if holds else self._lock.holder
        # `_acting` is set before the callback, which opens the workers only if this process acts.
        if holds:
            self._renewed_at = asked_at  # time before the request: never later than the API server's record
            if not self._acting:
                log.info("leading%s", " again after an outage of the API server" if self._led_before else "")
                self._acting = self._led_before = True
                await self._on_start()
            return
        # A former leader does not become a standby: its cache and its memory are of a time in which another
        # process has acted.
        if holds is False and self._led_before:
            self._acting = False
            raise LeadershipLostError(f"{self._lock.holder} leads now; this process ends and restarts as its standby")
        # The pause comes one retry before the limit, so that the work in progress ends before another process
        # may take over.
        if self._acting and not self._still_fresh():
            log.warning("cannot renew the leader Lease for %g s; not acting until it is renewed", LEADER_RENEW_SECONDS)
            self._acting = False
            await self._on_pause()

    async def release(self) -> None:
        """Release the Lease, so that the next candidate takes over at once. Best effort; call it after the last write."""
        if not self.is_leading():
            return
        try:
            async with asyncio.timeout(REQUEST_SECONDS / 2):
                await self._lock.release()
        except (ApiError, UnavailableError, TimeoutError) as error:
            log.info("the leader Lease was not released, it expires in %d s: %s", LEADER_DURATION_SECONDS, error)
        self._acting = False

    def _still_fresh(self) -> bool:
        """Return whether the next attempt would still end in time."""
        return self._renewed_at is not None and self._clock() - self._renewed_at + RETRY_SECONDS < LEADER_RENEW_SECONDS


TERRITORY_DURATION_SECONDS = 120
TERRITORY_RENEW_SECONDS = 30.0
"""Seconds between renewals; each is a read and a write per namespace with runs."""
STOP_SECONDS = 100.0
"""Seconds without a renewal after which a release stops acting: well before another one may take over."""
Place = tuple[str, str | None]
"""Namespace, and the operator that its runs name."""


@dataclass
class _Claim:
    lock: LeaseLock
    renewed_at: float = float("-inf")
    """Time of the request with which this release last renewed the Lease (steady clock)."""
    other: str = ""
    """Release that holds it instead."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Territory:
    """Places whose runs this release serves.

    Args:
        client: client of the API server.
        identity: identity of the release: all its replicas share it, and no other release has it.
        is_leading: whether this process may act.
        with_runs: places that have runs.
        on_change: callback with a place and the other release that holds it, or an empty name once no other release does.
        clock: steady seconds.
    """

    def __init__(
        self,
        client: Client,
        identity: str,
        *,
        is_leading: Callable[[], bool],
        with_runs: Callable[[], set[Place]],
        on_change: Callable[[Place, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._identity = identity
        self._is_leading = is_leading
        self._with_runs = with_runs
        self._on_change = on_change
        self._clock = clock
        self._claims: dict[Place, _Claim] = {}

    def places_of_others(self) -> dict[Place, str]:
        """Return the places that other releases hold, each with its release."""
        return {place: claim.other for place, claim in self._claims.items() if claim.other}

    def held_places(self) -> list[Place]:
        """Return the places where this release may act."""
        return [place for place, claim in self._claims.items() if self._is_held(claim)]

    async def may_act(self, place: Place) -> bool:
        """Return whether this release serves the runs of a place; the first call requests the Lease.

        Raises:
            ApiError, UnavailableError: the Lease cannot be read or written.
        """
        # A place is requested at its first run. Only one request is sent, although several workers may ask
        # for the same place.
        claim = self._claims.get(place)
        if claim is None:
            claim = self._claims[place] = _Claim(self._lock(place))
        if not self._is_held(claim) and not claim.other:
            async with claim.asking:
                if not self._is_held(claim) and not claim.other:
                    await self._renew_claim(place, claim)
        return self._is_held(claim)

    async def run(self) -> None:
        """Renew until cancelled, and take over abandoned places."""
        while True:
            await asyncio.sleep(TERRITORY_RENEW_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew all Leases of places with runs once; only the leader does."""
        for place in self._claims.keys() - self._with_runs():
            del self._claims[place]
        # The leadership is checked before each Lease, because a list of many places may take longer than it
        # lasts.
        for place, claim in list(self._claims.items()):
            if not self._is_leading():
                return
            try:
                async with claim.asking:
                    await self._renew_claim(place, claim)
            except (ApiError, UnavailableError) as error:
                log.log(
                    logging.WARNING if isinstance(error, ApiError) else logging.DEBUG,
                    "cannot renew the Lease %s of namespace %s: %s",
                    name_of(place),
                    place[0],
                    error,
                )

    def _is_held(self, claim: _Claim) -> bool:
        return self._clock() - claim.renewed_at < STOP_SECONDS

    async def _renew_claim(self, place: Place, claim: _Claim) -> None:
        asked_at, other = self._clock(), claim.other
        # The time before the request counts: this process then stops before its record at the API server
        # expires.
        if await claim.lock.acquire_or_renew():
            claim.renewed_at, claim.other = asked_at, ""
        else:
            claim.renewed_at, claim.other = float("-inf"), claim.lock.holder
        if claim.other != other:
            self._on_change(place, claim.other)

    def _lock(self, place: Place) -> LeaseLock:
        return LeaseLock(
            self._client,
            place[0],
            name_of(place),
            self._identity,
            duration=TERRITORY_DURATION_SECONDS,
            clock=self._clock,
        )


def name_of(place: Place) -> str:
    """Return the name of the Lease of a place."""
    return SERVED_LEASE + (f".{place[1]}" if place[1] else "")
