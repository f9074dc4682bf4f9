"""Changed addresses of the API server: only the orchestrator's network policy of a running attempt is rewritten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlrun_operator.decide.state_machine import decide
from rlrun_operator.settings import NetworkSettings, RenderSettings
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decisions import TypedDecision, typed_decision

RULE: dict[str, Any] = {"to": [{"ipBlock": {"cidr": "192.0.2.8/32"}}], "ports": [{"protocol": "TCP", "port": 6443}]}


KNOWN = NetworkSettings(discovered=True)
OTHER = NetworkSettings(api_server=(RULE,), discovered=True)


def start_run(network: NetworkSettings = KNOWN, spec: dict[str, Any] | None = None) -> Kube:
    kube = Kube(spec)
    kube.settings = RenderSettings(network=network)
    return kube.start()


def decide_network(kube: Kube, network: NetworkSettings, applied: str | None = None) -> TypedDecision:
    kube.settings = RenderSettings(network=network)
    observed = replace(kube.look(), access=applied)
    return typed_decision(decide(observed, kube.now, settings=kube.settings, fresh_key="k" * 32, random=0.5))


def test_running_attempt_gets_policy_with_the_new_address() -> None:
    kube = start_run()
    (apply,) = decide_network(kube, OTHER).apply
    assert (apply.manifest["kind"], apply.manifest["metadata"]["name"]) == ("NetworkPolicy", "run-egress")
    assert RULE in apply.manifest["spec"]["egress"]


def test_changed_address_is_applied_once() -> None:
    kube = start_run()
    assert decide_network(kube, KNOWN).apply == (), "an operator that was started again has nothing to write"
    assert decide_network(kube, OTHER, applied=OTHER.mark).apply == ()
    assert decide_network(kube, NetworkSettings()).apply == (), "an operator that may not ask leaves it as it is"


def test_attempt_without_addresses_gets_them_later() -> None:
    assert len(decide_network(start_run(NetworkSettings()), OTHER).apply) == 1


def test_suspended_run_or_run_without_policies_gets_none() -> None:
    assert decide_network(start_run(spec={"networkPolicy": {"mode": "None"}}), OTHER).apply == ()
    kube = start_run()
    kube.edit(suspend=True)
    for _ in range(60):
        kube.tick()
    assert kube.status["phase"] == "Suspended"
    assert decide_network(kube, OTHER).apply == ()


def test_new_attempt_has_policy_with_the_new_address() -> None:
    policies = [a for a in decide_network(Kube(), OTHER).apply if a.manifest["metadata"]["name"] == "run-egress"]
    assert [RULE in a.manifest["spec"]["egress"] for a in policies] == [True]
