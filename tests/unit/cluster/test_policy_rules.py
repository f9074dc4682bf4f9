"""NetworkPolicies as nftables rules."""

from typing import Any

import pytest

from tests.cluster.native.enforcer import dns_pod
from tests.cluster.native.policy_rules import peers, policy_types, rules, selects

SPACES = [
    {"metadata": {"name": "one", "labels": {"team": "a"}}},
    {"metadata": {"name": "two", "labels": {"team": "b"}}},
    {"metadata": {"name": "kube-system"}},
]


def pod(ip: str, namespace: str = "one", **labels: str) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8000}]
    return {
        "metadata": {"name": ip, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"podIP": ip, "phase": "Running"},
    }


ENGINE, CALLER, STRANGER = pod("10.77.128.2", app="engine"), pod("10.77.129.3", app="caller"), pod("10.77.129.4", "two")


def chain(spec: dict[str, Any], direction: str = "ingress", pods: tuple[dict[str, Any], ...] = ()) -> list[str]:
    """Return the lines of the engine's chain for one policy, or an empty list if no chain exists."""
    known = peers([ENGINE, CALLER, STRANGER, *pods], SPACES, "10.77.128.0/18", [dns_pod("10.77.0.2")])
    policy = {"metadata": {"namespace": "one"}, "spec": {"podSelector": {"matchLabels": {"app": "engine"}}, **spec}}
    _, found, rest = rules(known, [policy]).partition(f" chain {direction}_10_77_128_2 {{\n")
    return [line.strip() for line in rest.partition(" }\n")[0].splitlines()] if found else []


def test_selected_pod_accepts_only_allowed_traffic() -> None:
    assert chain({}) == ["counter drop"]
    assert chain({"ingress": [{}]}) == ["return", "counter drop"]
    peer = {"podSelector": {"matchLabels": {"app": "caller"}}}
    allowed = chain({"ingress": [{"from": [peer], "ports": [{"port": 8000}]}]})
    assert allowed == ["ip saddr { 10.77.129.3 } tcp dport 8000 return", "counter drop"]


def test_unselected_pod_is_unrestricted() -> None:
    assert "10.77.129.3" not in rules(peers([CALLER], SPACES, "10.77.128.0/18"), [])


def test_policy_restricts_only_its_direction() -> None:
    assert chain({}, "egress") == []
    assert chain({"policyTypes": ["Egress"]}) == []
    assert chain({"policyTypes": ["Egress"]}, "egress") == ["counter drop"]


def test_default_policy_types_follow_given_rules() -> None:
    assert policy_types({"spec": {}}) == ["Ingress"]
    assert policy_types({"spec": {"egress": []}}) == ["Ingress", "Egress"]


def test_namespace_selector_allows_other_namespaces() -> None:
    other = {"namespaceSelector": {"matchLabels": {"team": "b"}}}
    assert chain({"ingress": [{"from": [other]}]})[0] == "ip saddr { 10.77.129.4 } return"
    both = {**other, "podSelector": {"matchLabels": {"app": "caller"}}}
    assert chain({"ingress": [{"from": [both]}]}) == ["counter drop"]


def test_dns_is_found_by_its_usual_labels() -> None:
    spec = {
        "policyTypes": ["Egress"],
        "egress": [
            {
                "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
                "ports": [{"port": 53, "protocol": "UDP"}],
            }
        ],
    }
    assert chain(spec, "egress") == ["ip daddr { 10.77.0.2 } udp dport 53 return", "counter drop"]


@pytest.mark.parametrize(
    ("port", "match"),
    [
        ({"port": 8000, "endPort": 8010}, "tcp dport 8000-8010"),
        ({"port": "http"}, "tcp dport 8000"),
        ({"protocol": "SCTP"}, "meta l4proto sctp"),
        ({"port": "unknown"}, ""),
    ],
)
def test_ports(port: dict[str, Any], match: str) -> None:
    expected = [f"{match} return"] if match else []
    assert chain({"ingress": [{"ports": [port]}]}) == [*expected, "counter drop"]


def test_blocks_with_exceptions() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.77.128.0/24", "10.77.129.0/24"]}}
    assert chain({"ingress": [{"from": [block]}]})[0] == (
        "ip saddr 10.0.0.0/8 ip saddr != { 10.77.128.0/24, 10.77.129.0/24 } return"
    )


def test_finished_fake_and_host_network_pods_are_ignored() -> None:
    done, fake, host = pod("10.77.129.9", app="x"), pod("10.77.200.1", app="x"), pod("10.77.129.8", app="x")
    done["status"]["phase"], host["spec"]["hostNetwork"] = "Succeeded", True
    peer = {"podSelector": {"matchLabels": {"app": "x"}}}
    assert chain({"ingress": [{"from": [peer]}]}, pods=(done, fake, host)) == ["counter drop"]


@pytest.mark.parametrize(
    ("operator", "values", "taken"),
    [
        ("In", ["a", "b"], {"a"}),
        ("NotIn", ["a"], {"c", None}),
        ("Exists", None, {"a", "c"}),
        ("DoesNotExist", None, {None}),
    ],
)
def test_selector_expressions(operator: str, values: list[str] | None, taken: set[str | None]) -> None:
    selector = {"matchExpressions": [{"key": "k", "operator": operator, "values": values}]}
    labels: list[str | None] = ["a", "c", None]
    assert {value for value in labels if selects(selector, {"k": value} if value else {})} == taken


def test_policy_table_is_replaced_atomically_and_allows_replies() -> None:
    text = rules([], [])
    assert text.startswith("table ip networkpolicy\ndelete table ip networkpolicy\ntable ip networkpolicy {\n")
    assert text.count("ct state established,related accept") == 2
