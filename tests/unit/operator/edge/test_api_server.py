"""Addresses of the API server: what is read, what is done without, and what a change of them writes."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.kube.client import UnavailableError
from rlrun_operator.kube.connection import api_server_rules
from rlrun_operator.settings import NetworkSettings, SettingsError, from_environment
from rlrun_operator.state import Apply, Decision, Observed
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serving
from tests.unit.operator.edge.test_reconcile import Bench

SLICE = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"
SERVICE = "/api/v1/namespaces/default/services/kubernetes"


def seeded(*addresses: str) -> FakeApi:
    api = FakeApi()
    endpoints = [{"addresses": [address]} for address in addresses]
    api.seed(SLICE, {"endpoints": endpoints, "ports": [{"name": "https", "port": 6443}]})
    api.seed(SERVICE, {"spec": {"clusterIPs": ["10.96.0.1", "fd00::1"], "ports": [{"port": 443}]}})
    return api


def rule(port: int, *blocks: str) -> dict[str, Any]:
    ports = [{"protocol": "TCP", "port": port}]
    return {"to": [{"ipBlock": {"cidr": block}} for block in blocks], "ports": ports}


async def test_both_sides_of_the_service_are_named() -> None:
    async with serving(seeded("192.0.2.7", "192.0.2.5", "not.an.address")) as client:
        found = await api_server_rules(client)
    assert found == (rule(6443, "192.0.2.5/32", "192.0.2.7/32"), rule(443, "10.96.0.1/32", "fd00::1/128"))


async def test_what_cannot_be_read_is_told() -> None:
    api = seeded("192.0.2.7")
    api.hook = lambda verb, path, body: (403, "Forbidden", "no right") if "endpointslices" in path else None
    async with serving(api) as client:
        with pytest.raises(LookupError, match="403 no right"):
            await api_server_rules(client)
    async with serving(FakeApi()) as client:
        with pytest.raises(LookupError, match="EndpointSlice default/kubernetes has no address"):
            await api_server_rules(client)


POLICY = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "a-egress", "namespace": "ns", "labels": {"rlrun.io/run": "a"}},
}


async def test_what_was_applied_is_remembered_and_only_that() -> None:
    api, other = FakeApi(), POLICY | {"metadata": {**POLICY["metadata"], "name": "a-rlrun"}}  # type: ignore[dict-item]
    applied = [other, POLICY]
    learned = NetworkSettings(api_server=(rule(6443, "192.0.2.7/32"),), discovered=True)

    def brain(observed: Observed) -> Decision:
        return scripted_decision(status={}, apply=(Apply(applied.pop(0)),) if applied else ())

    async with serving(api) as client:
        bench = Bench(api, client, brain)
        bench.reconciler.settle_network(learned)
        for _ in range(3):
            await bench.go()
    assert [observed.access for observed in bench.seen] == [None, None, learned.mark]


async def test_a_policy_that_could_not_be_applied_is_not_remembered() -> None:
    api = FakeApi()

    async with serving(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={}, apply=(Apply(POLICY),)))
        api.hook = lambda verb, path, body: (500, "InternalError", "later")
        for _ in range(2):
            with pytest.raises(UnavailableError, match="later"):
                await bench.go()
    assert [observed.access for observed in bench.seen] == [None, None]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("[]", r"RLRUN_NETWORK as a whole"),
        ('{"dns": {}}', r"RLRUN_NETWORK dns"),
        ('{"apiserver": []}', r"RLRUN_NETWORK apiserver .*correct networkPolicy in the chart's values"),
    ],
)
def test_wrong_settings_are_refused_by_their_field(given: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        from_environment({"RLRUN_NETWORK": given})
