"""The API server's addresses change while a run lives: its orchestrator's policy follows, and nothing else is written."""

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


def begun(network: NetworkSettings = KNOWN, spec: dict[str, Any] | None = None) -> Kube:
    kube = Kube(spec)
    kube.settings = RenderSettings(network=network)
    return kube.start()


def decided(kube: Kube, network: NetworkSettings, applied: str | None = None) -> TypedDecision:
    kube.settings = RenderSettings(network=network)
    observed = replace(kube.look(), access=applied)
    return typed_decision(decide(observed, kube.now, settings=kube.settings, fresh_key="k" * 32, random=0.5))


def test_a_running_attempt_gets_the_orchestrators_policy_with_the_new_address() -> None:
    kube = begun()
    (apply,) = decided(kube, OTHER).apply
    assert (apply.manifest["kind"], apply.manifest["metadata"]["name"]) == ("NetworkPolicy", "run-egress")
    assert RULE in apply.manifest["spec"]["egress"]


def test_it_is_applied_once() -> None:
    kube = begun()
    assert decided(kube, KNOWN).apply == (), "an operator that was started again has nothing to write"
    assert decided(kube, OTHER, applied=OTHER.mark).apply == ()
    assert decided(kube, NetworkSettings()).apply == (), "an operator that may not ask leaves it as it is"


def test_an_attempt_that_began_without_addresses_gets_them() -> None:
    assert len(decided(begun(NetworkSettings()), OTHER).apply) == 1


def test_a_run_without_policies_and_one_that_is_over_get_none() -> None:
    assert decided(begun(spec={"networkPolicy": {"mode": "None"}}), OTHER).apply == ()
    kube = begun()
    kube.edit(suspend=True)
    for _ in range(60):
        kube.tick()
    assert kube.status["phase"] == "Suspended"
    assert decided(kube, OTHER).apply == ()


def test_an_attempt_that_begins_is_made_with_it_once() -> None:
    policies = [a for a in decided(Kube(), OTHER).apply if a.manifest["metadata"]["name"] == "run-egress"]
    assert [RULE in a.manifest["spec"]["egress"] for a in policies] == [True]
