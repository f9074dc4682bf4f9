"""Leader election: one leader, a pause during an outage, and the end of the process after a lost Lease."""

from __future__ import annotations

import copy

import pytest
from kubernetes.client import Configuration

from rlrun_operator.decide.state_machine import decide
from rlrun_operator.kube.client import Client
from rlrun_operator.kube.connection import Connection
from rlrun_operator.kube.lease_lock import LONGEST_SECONDS
from rlrun_operator.kube.resources import CLAIM
from rlrun_operator.manager import Operator
from rlrun_operator.runtime.leases import (
    LEADER_DURATION_SECONDS,
    LEADER_RENEW_SECONDS,
    Leader,
    LeadershipLostError,
    NotLeadingError,
)
from rlrun_operator.settings import OperatorSettings
from tests.unit.operator.edge.fake_api import FakeApi, serve_api

LEASE = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/rlrun-operator"


class Candidate:
    """Candidate with a clock that the test controls."""

    def __init__(self, client: Client, identity: str, clock: list[float]) -> None:
        self.log: list[str] = []

        async def start() -> None:
            self.log.append("start")

        async def pause() -> None:
            self.log.append("pause")

        self.leader = Leader(
            client,
            "ns",
            identity,
            on_start=start,
            on_pause=pause,
            on_rewound=lambda: self.log.append("rewound"),
            clock=lambda: clock[0],
        )

    async def step(self) -> None:
        await self.leader.step()


async def test_rewound_lease_reports_restored_etcd_once() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        leader, standby = Candidate(client, "first", clock), Candidate(client, "second", clock)
        await leader.step()
        backup = copy.deepcopy(api.objects[LEASE])
        for _ in range(3):
            clock[0] += 2.0
            await leader.step()
            await standby.step()
        assert leader.log == ["start"]
        api.objects[LEASE] = backup
        await standby.step()
        await leader.step()
        assert standby.log == ["rewound"], "its caches are of the lost history, too"
        assert leader.log == ["start", "rewound"]
        clock[0] += 2.0
        await leader.step()
        assert leader.log == ["start", "rewound"]


async def test_second_candidate_waits_until_the_lease_expires() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first, second = Candidate(client, "first", clock), Candidate(client, "second", clock)
        for _ in range(20):
            await first.step()
            await second.step()
            assert (first.leader.is_leading(), second.leader.is_leading()) == (True, False)
            clock[0] += 2.0
        clock[0] += LEADER_DURATION_SECONDS - 2.5  # the first leader stopped
        await second.step()
        assert not second.leader.is_leading()
        clock[0] += 2.0
        await second.step()
        assert second.log == ["start"]
        assert api.objects[LEASE]["spec"]["leaseTransitions"] == 1


async def test_standby_logs_the_leader_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first, second = Candidate(client, "first", clock), Candidate(client, "second", clock)
        with caplog.at_level("INFO", "rlrun_operator.runtime.leases"):
            for _ in range(5):
                await first.step()
                await second.step()
                clock[0] += 2.0
            assert (first.leader.stands_by, second.leader.stands_by) == (None, "first")
            told = [record.getMessage() for record in caplog.records if "standing by" in record.getMessage()]
            assert told == ["standing by: first leads (Lease ns/rlrun-operator)"]
        await first.leader.release()
        await second.step()
        assert second.leader.stands_by is None


async def test_two_releases_in_one_namespace_use_separate_leases() -> None:
    api = FakeApi()

    async def nothing() -> None:
        return None

    async with serve_api(api) as client:
        names = ("a-rlrun-operator", "b-rlrun-operator")
        both = [Leader(client, "ns", n, name=n, on_start=nothing, on_pause=nothing) for n in names]
        for leader in both:
            await leader.step()
        assert [leader.is_leading() for leader in both] == [True, True]
    assert {path.rsplit("/", 1)[1] for path in api.objects} == set(names)


async def test_released_lease_is_acquired_immediately() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first, second = Candidate(client, "first", clock), Candidate(client, "second", clock)
        await first.step()
        await second.step()
        await first.leader.release()
        assert not first.leader.is_leading()
        await second.step()
        assert second.leader.is_leading()


async def test_leader_pauses_during_outage_and_resumes() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        candidate = Candidate(client, "only", clock)
        await candidate.step()
        api.hook = lambda verb, path, body: (503, "", "away")
        while clock[0] < 60.0:
            clock[0] += 2.0
            await candidate.step()
            if clock[0] >= LEADER_RENEW_SECONDS:
                assert not candidate.leader.is_leading()
        assert candidate.log == ["start", "pause"]
        api.hook = lambda verb, path, body: None
        await candidate.step()
        assert candidate.log == ["start", "pause", "start"]
        assert candidate.leader.is_leading()


async def test_frozen_process_does_not_write_after_it_thaws() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        candidate = Candidate(client, "only", clock)
        await candidate.step()
        candidate.leader.check_leading()
        clock[0] += LEADER_RENEW_SECONDS  # no step ran in this time
        with pytest.raises(NotLeadingError):
            candidate.leader.check_leading()


async def test_leader_measures_lease_from_before_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server may record a renewal any time after the request, and other candidates count from there."""
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first = Candidate(client, "first", clock)
        renew = first.leader._lock.acquire_or_renew

        async def slow() -> bool:
            holds = await renew()
            clock[0] += 4.0
            return holds

        monkeypatch.setattr(first.leader._lock, "acquire_or_renew", slow)
        await first.step()
        clock[0] = LEADER_RENEW_SECONDS - 0.1
        assert first.leader.is_leading()
        clock[0] = LEADER_RENEW_SECONDS
        assert not first.leader.is_leading()


async def test_operator_without_leadership_reads_and_cannot_write() -> None:
    """Preconditions prevent writes over unseen states, but not the creation of a deleted child."""
    api = FakeApi()
    async with serve_api(api) as client:
        operator = Operator(OperatorSettings(), Connection(Configuration(host=client._server)), decide)
        claim = {"apiVersion": "v1", "kind": CLAIM.kind, "metadata": {"name": "c", "namespace": "ns"}}
        try:
            with pytest.raises(NotLeadingError):
                await operator._client.create(claim)
            assert await operator._client.get(CLAIM, "ns", "c") is None
        finally:
            await operator._session.close()
    assert api.writes() == []


async def test_replaced_leader_ends_with_an_error() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        first, second = Candidate(client, "first", clock), Candidate(client, "second", clock)
        await first.step()
        await second.step()
        clock[0] += LEADER_DURATION_SECONDS + 1.0
        await second.step()
        with pytest.raises(LeadershipLostError, match="second leads"):
            await first.step()
        assert not first.leader.is_leading()


async def test_expired_lease_has_one_winner() -> None:
    api, clock = FakeApi(), [0.0]
    async with serve_api(api) as client:
        old = Candidate(client, "old", clock)
        await old.step()
        first, second = Candidate(client, "first", clock), Candidate(client, "second", clock)
        await first.step()
        await second.step()
        clock[0] += LEADER_DURATION_SECONDS + 1.0
        stale = dict(api.objects[LEASE])
        await first.step()
        current, api.objects[LEASE] = api.objects[LEASE], stale
        original = api._patch

        def late(request: object, path: str, body: dict[str, object]) -> object:
            api.objects[LEASE] = current  # `first` wrote after the read and before the write of `second`
            return original(request, path, body)  # type: ignore[arg-type]

        api._patch = late  # type: ignore[method-assign,assignment]
        await second.step()
        assert (first.leader.is_leading(), second.leader.is_leading()) == (True, False)


async def test_missing_lease_rights_are_logged_and_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    api, clock = FakeApi(), [0.0]
    api.hook = lambda verb, path, body: (403, "Forbidden", 'User "x" cannot get resource "leases"')
    async with serve_api(api) as client:
        candidate = Candidate(client, "only", clock)
        await candidate.step()
    assert not candidate.leader.is_leading()
    assert 'cannot get resource "leases"' in caplog.text


async def test_lease_with_largest_numbers_is_taken_over() -> None:
    api, clock = FakeApi(), [0.0]
    spec = {"holderIdentity": "nobody", "leaseDurationSeconds": 2**31 - 1, "leaseTransitions": 2**31 - 1}
    api.seed(LEASE, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec})
    async with serve_api(api) as client:
        candidate = Candidate(client, "first", clock)
        await candidate.step()
        assert not candidate.leader.is_leading()
        clock[0] += LONGEST_SECONDS + 1
        await candidate.step()
        assert candidate.leader.is_leading()
    assert api.objects[LEASE]["spec"]["leaseTransitions"] == 2**31 - 1


async def test_late_renewal_does_not_block_the_start_of_work() -> None:
    """A restarted API server answers late, and the next renewal does not start work, so a complete cache must start it."""
    clock = [0.0]
    async with serve_api(FakeApi()) as client:
        operator = Operator(OperatorSettings(), Connection(Configuration(host=client._server)), decide)
        operator._leader._clock = lambda: clock[0]
        try:
            await operator._leader.step()
            clock[0] += LEADER_RENEW_SECONDS + 0.1
            assert not operator._leader.is_leading()
            for stream in operator._streams:
                operator._sync._mark_synced(stream)
            await operator._leader.step()
            assert operator._leader.is_leading()
            assert operator._workers.is_open
            clock[0] += LEADER_RENEW_SECONDS + 0.1
            with pytest.raises(NotLeadingError):
                operator._leader.check_leading()
        finally:
            await operator._workers.close()
            await operator._session.close()
