"""One operator per namespace: a Lease in each namespace with runs names the release that serves them.

Releases have separate leader Leases and do not see each other; two releases that are configured for one namespace would both act on its
runs. Therefore each leader acquires this Lease before it acts in a namespace, and keeps renewing it. The holder is the release, not its
process: an upgrade or a restart does not transfer the runs. The Lease is never released: after an uninstallation, another release takes
over after `TERRITORY_DURATION_SECONDS`.

Runs that name their operator (`managedBy`) have a separate Lease, so that operators of different names can share a namespace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.lease_lock import LeaseLock
from rlrun_operator.names import SERVED_LEASE

TERRITORY_DURATION_SECONDS = 120
TERRITORY_RENEW_SECONDS = 30.0
"""Seconds between renewals; each is a read and a write per namespace with runs."""
STOP_SECONDS = 100.0
"""Seconds without a renewal after which a release stops acting: well before another one may take over."""
Place = tuple[str, str | None]
"""Namespace, and the operator that its runs name."""
log = logging.getLogger(__name__)


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

    def others(self) -> dict[Place, str]:
        """Return the places that other releases hold, each with its release."""
        return {place: claim.other for place, claim in self._claims.items() if claim.other}

    def held(self) -> list[Place]:
        """Return the places where this release may act."""
        return [place for place, claim in self._claims.items() if self._holds(claim)]

    async def may_act(self, place: Place) -> bool:
        """Return whether this release serves the runs of a place; the first call requests the Lease.

        Raises:
            ApiError, UnavailableError: the Lease cannot be read or written.
        """
        claim = self._claims.get(place)
        if claim is None:
            claim = self._claims[place] = _Claim(self._lock(place))
        if not self._holds(claim) and not claim.other:
            async with claim.asking:
                if not self._holds(claim) and not claim.other:
                    await self._renew_claim(place, claim)
        return self._holds(claim)

    async def run(self) -> None:
        """Renew until cancelled, and take over abandoned places."""
        while True:
            await asyncio.sleep(TERRITORY_RENEW_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew all Leases of places with runs once; only the leader does."""
        for place in self._claims.keys() - self._with_runs():
            del self._claims[place]
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

    def _holds(self, claim: _Claim) -> bool:
        return self._clock() - claim.renewed_at < STOP_SECONDS

    async def _renew_claim(self, place: Place, claim: _Claim) -> None:
        asked_at, other = self._clock(), claim.other
        if await claim.lock.acquire_or_renew():
            claim.renewed_at, claim.other = asked_at, ""
        else:
            claim.renewed_at, claim.other = float("-inf"), claim.lock.holder
        if claim.other != other:
            self._on_change(place, claim.other)

    def _lock(self, place: Place) -> LeaseLock:
        return LeaseLock(
            self._client, place[0], name_of(place), self._identity, duration=TERRITORY_DURATION_SECONDS, clock=self._clock
        )


def name_of(place: Place) -> str:
    """Return the name of the Lease of a place."""
    return SERVED_LEASE + (f".{place[1]}" if place[1] else "")
