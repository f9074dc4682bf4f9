"""One operator per namespace: a Lease in each namespace with runs names the release that looks after them.

Releases have leader Leases of their own and know nothing of each other; two that are set to serve one namespace would both act on its
runs. So the leader of each holds this Lease before it acts there, and goes on holding it. The holder is the release, not its process: an
upgrade or a restart does not hand the runs over. Nor is it released: one that is uninstalled is followed after `DURATION_SECONDS`.

Runs that name their operator (`managedBy`) have a Lease of their own, so operators of different names can share a namespace.
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

DURATION_SECONDS = 120
RENEW_SECONDS = 30.0
"""A read and a write per namespace with runs this often."""
STOP_SECONDS = 100.0
"""A release that could not renew for so long does not act: well before another one may."""
Place = tuple[str, str | None]
"""Namespace, and the operator that the runs name."""
log = logging.getLogger(__name__)


@dataclass
class _Claim:
    lock: LeaseLock
    renewed_at: float = float("-inf")
    """Time of the request for what this release holds (steady clock)."""
    other: str = ""
    """Release that holds it instead."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Territory:
    """The places whose runs this release looks after.

    Args:
        identity: of the release: all its replicas share it, and no other release has it.
        is_leading: whether this process may act.
        with_runs: the places that have runs.
        on_change: called with a place that another release holds (its second argument), or holds no longer (empty).
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
        """The places that other releases hold, with these."""
        return {place: claim.other for place, claim in self._claims.items() if claim.other}

    def held(self) -> list[Place]:
        """The places where this release may act."""
        return [place for place, claim in self._claims.items() if self._holds(claim)]

    async def may_act(self, place: Place) -> bool:
        """True if this release looks after the runs of a place; asked for at the first time.

        Raises:
            ApiError, UnavailableError: that is not known.
        """
        claim = self._claims.get(place)
        if claim is None:
            claim = self._claims[place] = _Claim(self._lock(place))
        if not self._holds(claim) and not claim.other:
            async with claim.asking:
                if not self._holds(claim) and not claim.other:
                    await self._ask(place, claim)
        return self._holds(claim)

    async def run(self) -> None:
        """Renew until cancelled, and take over what others leave."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew once, wherever there are runs; only the leader does."""
        for place in self._claims.keys() - self._with_runs():
            del self._claims[place]
        for place, claim in list(self._claims.items()):
            if not self._is_leading():
                return
            try:
                async with claim.asking:
                    await self._ask(place, claim)
            except (ApiError, UnavailableError) as error:
                log.log(
                    logging.WARNING if isinstance(error, ApiError) else logging.DEBUG,
                    "the Lease %s of namespace %s was not renewed: %s",
                    name_of(place),
                    place[0],
                    error,
                )

    def _holds(self, claim: _Claim) -> bool:
        return self._clock() - claim.renewed_at < STOP_SECONDS

    async def _ask(self, place: Place, claim: _Claim) -> None:
        asked_at, other = self._clock(), claim.other
        if await claim.lock.acquire_or_renew():
            claim.renewed_at, claim.other = asked_at, ""
        else:
            claim.renewed_at, claim.other = float("-inf"), claim.lock.holder
        if claim.other != other:
            self._on_change(place, claim.other)

    def _lock(self, place: Place) -> LeaseLock:
        return LeaseLock(
            self._client, place[0], name_of(place), self._identity, duration=DURATION_SECONDS, clock=self._clock
        )


def name_of(place: Place) -> str:
    """Name of the Lease."""
    return SERVED_LEASE + (f".{place[1]}" if place[1] else "")
