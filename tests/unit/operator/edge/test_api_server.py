"""Addresses of the API server: discovery, missing rights and changes of network policies."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.kube.client import UnavailableError
from rlrun_operator.kube.connection import api_server_rules
from rlrun_operator.settings import NetworkSettings, SettingsError, from_environment
from rlrun_operator.state import Apply, Decision, Observed
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serve_api
from tests.unit.operator.edge.test_reconcile import Bench

SLICE = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"
SERVICE = "/api/v1/namespaces/default/services/kubernetes"


def make_seeded_api(*addresses: str) -> FakeApi:
    api = FakeApi()
    endpoints = [{"addresses": [address]} for address in addresses]
    api.seed(SLICE, {"endpoints": endpoints, "ports": [{"name": "https", "port": 6443}]})
    api.seed(SERVICE, {"spec": {"clusterIPs": ["10.96.0.1", "fd00::1"], "ports": [{"port": 443}]}})
    return api


def make_rule(port: int, *blocks: str) -> dict[str, Any]:
    ports = [{"protocol": "TCP", "port": port}]
    return {"to": [{"ipBlock": {"cidr": block}} for block in blocks], "ports": ports}


async def test_api_server_rules_contain_endpoint_and_service_addresses() -> None:
    async with serve_api(make_seeded_api("192.0.2.7", "192.0.2.5", "not.an.address")) as client:
        found = await api_server_rules(client)
    assert found == (make_rule(6443, "192.0.2.5/32", "192.0.2.7/32"), make_rule(443, "10.96.0.1/32", "fd00::1/128"))


async def test_unreadable_api_server_address_is_an_error() -> None:
    api = make_seeded_api("192.0.2.7")
    api.hook = lambda verb, path, body: (403, "Forbidden", "no right") if "endpointslices" in path else None
    async with serve_api(api) as client:
        with pytest.raises(LookupError, match="403 no right"):
            await api_server_rules(client)
    async with serve_api(FakeApi()) as client:
        with pytest.raises(LookupError, match="EndpointSlice default/kubernetes has no address"):
            await api_server_rules(client)


POLICY = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "a-egress", "namespace": "ns", "labels": {"rlrun.io/run": "a"}},
}


async def test_network_mark_is_remembered_only_after_policies_are_applied() -> None:
    api, other = FakeApi(), POLICY | {"metadata": {**POLICY["metadata"], "name": "a-rlrun"}}  # type: ignore[dict-item]
    applied = [other, POLICY]
    learned = NetworkSettings(api_server=(make_rule(6443, "192.0.2.7/32"),), discovered=True)

    def brain(observed: Observed) -> Decision:
        return scripted_decision(status={}, apply=(Apply(applied.pop(0)),) if applied else ())

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        bench.reconciler.settle_network(learned)
        for _ in range(3):
            await bench.go()
    assert [observed.access for observed in bench.seen] == [None, None, learned.mark]


async def test_failed_policy_apply_is_not_remembered() -> None:
    api = FakeApi()

    async with serve_api(api) as client:
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
def test_invalid_settings_are_refused_with_their_field(given: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        from_environment({"RLRUN_NETWORK": given})
