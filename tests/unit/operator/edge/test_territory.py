"""Two releases in one namespace: one acts, and the other takes over after the first is uninstalled."""

from __future__ import annotations

from rlrun_operator.kube.client import Client
from rlrun_operator.runtime.leases import (
    STOP_SECONDS,
    TERRITORY_DURATION_SECONDS,
    TERRITORY_RENEW_SECONDS,
    Place,
    Territory,
)
from tests.unit.operator.edge.fake_api import FakeApi, serve_api

TEAM: Place = ("team-a", None)


class Release:
    """Release with a clock that the test controls."""

    def __init__(self, client: Client, identity: str, clock: list[float]) -> None:
        self.leads, self.runs = True, {TEAM}
        self.changes: list[tuple[Place, str]] = []
        self.territory = Territory(
            client,
            identity,
            is_leading=lambda: self.leads,
            with_runs=lambda: self.runs,
            on_change=lambda place, other: self.changes.append((place, other)),
            clock=lambda: clock[0],
        )

    async def acts(self, place: Place = TEAM) -> bool:
        return await self.territory.may_act(place)


async def test_second_release_takes_over_after_the_first_ends() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first, second = Release(client, "a/op", clock), Release(client, "b/op", clock)
        assert (await first.acts(), await second.acts()) == (True, False)
        for _ in range(10):
            clock[0] += TERRITORY_RENEW_SECONDS
            await second.territory.renew()
            await first.territory.renew()
            assert (await first.acts(), await second.acts()) == (True, False)
        assert (first.changes, second.changes) == ([], [(TEAM, "a/op")])
        assert (first.territory.held_places(), second.territory.places_of_others()) == ([TEAM], {TEAM: "a/op"})
        waited = 0.0
        while not await second.acts():  # the first release is uninstalled
            assert waited <= TERRITORY_DURATION_SECONDS + TERRITORY_RENEW_SECONDS
            assert not (await second.acts())
            waited += TERRITORY_RENEW_SECONDS
            clock[0] += TERRITORY_RENEW_SECONDS
            await second.territory.renew()
        assert waited >= TERRITORY_DURATION_SECONDS
        assert second.changes[1:] == [(TEAM, "")]
        await first.territory.renew()
        assert not await first.acts(), "it came back"


async def test_release_stops_before_its_territory_can_be_taken() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        release = Release(client, "a/op", clock)
        assert await release.acts()
        asked = len(api.requests)
        assert await release.acts()
        assert len(api.requests) == asked, "nothing per pass"
        clock[0] += STOP_SECONDS
        assert release.territory.held_places() == []
        assert STOP_SECONDS + TERRITORY_RENEW_SECONDS / 2 < TERRITORY_DURATION_SECONDS
        assert await release.acts(), "it asks again"


async def test_territory_is_shared_by_replicas_and_divided_by_name() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first, again, other = (Release(client, name, clock) for name in ("a/op", "a/op", "b/op"))
        assert await first.acts()
        assert await again.acts(), "an upgrade waits for nobody"
        assert await other.acts(("team-a", "b")), "runs that name it"
        assert not await other.acts()


async def test_territory_is_renewed_only_by_leader_with_runs() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        release = Release(client, "a/op", clock)
        await release.acts()
        asked = len(api.requests)
        release.leads = False
        await release.territory.renew()
        release.leads, release.runs = True, set()
        await release.territory.renew()
        assert len(api.requests) == asked
        assert release.territory.held_places() == []
