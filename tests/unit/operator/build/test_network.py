"""Network policies of a run, evaluated as a network plugin would."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from rlrun_operator.render import RunContext
from rlrun_operator.render.network import outside_rules
from rlrun_operator.restrictions import Installation, RunPolicy, find_refusals
from rlrun_operator.settings import NetworkSettings
from tests.cluster.native.policy_rules import selects
from tests.unit.operator.build.examples import container, context, everything
from tests.unit.operator.build.test_guest import SHARED, make_guest

STORE, CHANNEL, POD, ENGINE, METRICS, ANY = 29500, 29600, 29601, 8000, 9100, 40000
PORTS = (STORE, CHANNEL, POD, ENGINE, METRICS, ANY)
ROLES = ("trainer", "inference", "orchestrator")
Labels = dict[str, str]
Way = tuple[str, str, int]


class Elsewhere(NamedTuple):
    """Pods of another namespace."""

    namespace: str


def list_policies(*runs: RunContext) -> list[dict[str, Any]]:
    return [child["spec"] for ctx in runs for child in everything(ctx) if child["kind"] == "NetworkPolicy"]


def make_labels(run: str, role: str) -> Labels:
    return {"rlrun.io/run": run, "rlrun.io/role": role}


def is_allowed(found: list[dict[str, Any]], source: Labels | None, target: Labels | Elsewhere | str, port: int) -> bool:
    """Return whether a TCP connection is allowed. A source of None is a pod outside of all runs; a text as target is an external
    address."""
    if source is not None and not _allowed(found, source, ("egress", "to"), target, port):
        return False
    return isinstance(target, str | Elsewhere) or _allowed(found, target, ("ingress", "from"), source, port)


def _allowed(
    found: list[dict[str, Any]], own: Labels, way: tuple[str, str], other: Labels | Elsewhere | str | None, port: int
) -> bool:
    direction, side = way
    mine = [p for p in found if selects(p["podSelector"], own) and direction.capitalize() in p["policyTypes"]]
    rules = [rule for policy in mine for rule in policy.get(direction, ())]
    return not mine or any(_peer(rule.get(side), other) and _port(rule.get("ports"), port) for rule in rules)


def _peer(peers: list[dict[str, Any]] | None, other: Labels | Elsewhere | str | None) -> bool:
    if not peers:
        return True
    if isinstance(other, str):
        return any(_has_address(peer["ipBlock"], other) for peer in peers if "ipBlock" in peer)
    if isinstance(other, Elsewhere):
        spaces = (
            peer["namespaceSelector"] for peer in peers if "namespaceSelector" in peer and "podSelector" not in peer
        )
        return any(selects(space, {"kubernetes.io/metadata.name": other.namespace}) for space in spaces)
    here = (peer["podSelector"] for peer in peers if "podSelector" in peer and "namespaceSelector" not in peer)
    return other is not None and any(selects(selector, other) for selector in here)


def _has_address(block: dict[str, Any], text: str) -> bool:
    address = ipaddress.ip_address(text)
    left_out = any(address in ipaddress.ip_network(cidr) for cidr in block.get("except", ()))
    return address in ipaddress.ip_network(block["cidr"]) and not left_out


def _port(ports: list[dict[str, Any]] | None, port: int) -> bool:
    return not ports or any(entry["protocol"] == "TCP" and entry.get("port", port) == port for entry in ports)


def list_ways(found: list[dict[str, Any]]) -> Iterator[Way]:
    for source in ROLES:
        for target in ROLES:
            for port in PORTS:
                if is_allowed(found, make_labels("run", source), make_labels("run", target), port):
                    yield source, target, port


DOORS = {("orchestrator", "trainer", CHANNEL), ("orchestrator", "inference", ENGINE)}


def test_orchestrator_reaches_only_trainer_channel_and_engines() -> None:
    group = {("trainer", "trainer", port) for port in PORTS}
    assert set(list_ways(list_policies(context()))) == group | DOORS


def test_nccl_transfer_opens_ports_between_trainer_and_engines() -> None:
    both = ("trainer", "inference")
    group = {(source, target, port) for source in both for target in both for port in PORTS}
    assert set(list_ways(list_policies(context({"weightSync": {"transport": "NCCL"}})))) == group | DOORS


def test_colocated_engines_are_reached_at_trainer_pods() -> None:
    both = context({"placement": {"colocate": True}, "algorithm": {"maxAsyncLevel": 0}})
    asked = {way for way in list_ways(list_policies(both)) if way[0] == "orchestrator"}
    assert asked == {("orchestrator", "trainer", CHANNEL), ("orchestrator", "trainer", ENGINE)}


@pytest.mark.parametrize("role", ROLES)
def test_run_and_other_pods_cannot_connect(role: str) -> None:
    found = list_policies(context())
    others = (None, make_labels("other", "trainer"), make_labels("other", "orchestrator"))
    assert [p for p in PORTS for other in others if is_allowed(found, other, make_labels("run", role), p)] == []
    assert [p for p in PORTS if is_allowed(found, make_labels("run", role), make_labels("other", "trainer"), p)] == []


def list_reaching_roles(found: list[dict[str, Any]], port: int, address: str = "203.0.113.7") -> set[str]:
    return {role for role in ROLES if is_allowed(found, make_labels("run", role), address, port)}


API_SERVER = {"to": [{"ipBlock": {"cidr": "10.9.8.7/32"}}], "ports": [{"protocol": "TCP", "port": 6443}]}


def set_known_address(ctx: RunContext) -> RunContext:
    return replace(ctx, settings=replace(ctx.settings, network=NetworkSettings(api_server=(API_SERVER,))))


def test_api_server_is_reached_only_at_its_address() -> None:
    found = list_policies(set_known_address(context()))
    assert list_reaching_roles(found, 6443, "10.9.8.7") == {"orchestrator"}
    assert (
        list_reaching_roles(found, 443, "10.9.8.7")
        == list_reaching_roles(found, 6443)
        == list_reaching_roles(found, 443)
        == set()
    )
    unknown = list_policies(context())
    assert list_reaching_roles(unknown, 443) == list_reaching_roles(unknown, 6443) == {"orchestrator"}


READERS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"model": {"name": "a/b"}}, set(ROLES)),
    ({"algorithm": {"reference": {"model": "a/teacher"}}}, {"trainer"}),
    ({"algorithm": {"reference": {"model": "/models/teacher"}}}, set()),
    ({"algorithm": {"preset": "distill", "reference": {"model": "a/teacher", "revision": "v1"}}}, {"trainer"}),
    ({"algorithm": {"preset": "ppo", "critic": {}}}, set()),
    ({"model": {"name": "a/b"}, "algorithm": {"preset": "ppo", "critic": {}}}, set(ROLES)),
    ({"model": {"tiny": {"warmupEnvironment": "gsm8k"}}}, {"trainer"}),
    ({"model": {"tiny": {"warmupEnvironment": "gsm8k", "warmupArgs": {"source": "bundled"}}}}, set()),
    ({"environments": [{"id": "gsm8k"}]}, {"orchestrator"}),
    ({"environments": [{"id": "gsm8k", "args": {"source": "bundled"}}]}, set()),
    ({"environments": [{"id": "gsm8k", "args": {"path": "/data/gsm8k"}}]}, set()),
    ({"environments": [{"id": "dataset", "args": {"name": "a/rows"}}]}, {"orchestrator"}),
    ({"environments": [{"id": "dataset", "args": {"path": "/data/rows"}}]}, set()),
    ({"environments": [], "task": "SFT", "data": {"sources": [{"name": "a/chats"}]}}, {"orchestrator"}),
]


@pytest.mark.parametrize(("edit", "readers"), READERS, ids=[str(edit) for edit, _ in READERS])
def test_hub_is_open_to_roles_that_read_it(edit: dict[str, Any], readers: set[str]) -> None:
    found = list_policies(set_known_address(context(edit)))
    assert list_reaching_roles(found, 443) == readers
    assert list_reaching_roles(found, 6443) == set()


def test_extra_egress_applies_to_all_pods() -> None:
    judge = {"to": [{"ipBlock": {"cidr": "198.51.100.9/32"}}], "ports": [{"protocol": "TCP", "port": 8443}]}
    found = list_policies(context({"networkPolicy": {"extraEgress": [judge]}}))
    assert list_reaching_roles(found, 8443, "198.51.100.9") == set(ROLES)
    assert list_policies(context({"networkPolicy": {"mode": "None"}})) == []


def test_pods_reach_only_the_cluster_dns() -> None:
    for policy in list_policies(context()):
        (dns,) = (rule for rule in policy["egress"] if any(port["port"] == 53 for port in rule.get("ports", ())))
        pods, node = dns["to"]
        assert pods["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
        assert pods["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
        assert node == {"ipBlock": {"cidr": "169.254.20.10/32"}}


def test_guest_reaches_only_host_channel_and_engines() -> None:
    found = list_policies(context(SHARED, name="host"), make_guest())
    asks = make_labels("guest", "orchestrator")
    open_ways = {
        (role, port) for role in ROLES for port in PORTS if is_allowed(found, asks, make_labels("host", role), port)
    }
    assert open_ways == {("trainer", CHANNEL), ("inference", ENGINE)}
    assert [p for p in PORTS for role in ROLES if is_allowed(found, make_labels("host", role), asks, p)] == []


TRACKED = {"tensorboard": {}, "trackio": {}}
OUTSIDE, LITERAL = "203.0.113.7", "192.0.2.7"
DOORS_OUT = (80, 443, 5000, 8443)
IN_TOOLS: set[tuple[str | Elsewhere, int]] = {(Elsewhere("tools"), port) for port in DOORS_OUT}
JUDGED: list[dict[str, Any]] = [
    {"reward": "judge", "reward_args": {"model": "m", "base_url": "{url}"}},
    {"reward": ["math", {"name": "reward-model", "args": {"model": "m", "base_url": "{url}"}}]},
    {"reward_by_source": {"a": "math", "*": [{"name": "group-judge", "args": {"model": "m", "base_url": "{url}"}}]}},
]
NAMED: list[tuple[str, set[tuple[str | Elsewhere, int]]]] = [
    ("https://mlflow.example.org", {(OUTSIDE, 443)}),
    ("http://mlflow.example.org", {(OUTSIDE, 80)}),
    ("https://mlflow.example.org:8443/mlflow", {(OUTSIDE, 8443)}),
    ("http://192.0.2.7:8443/v1", {(LITERAL, 8443)}),
    ("http://mlflow.tools.svc", IN_TOOLS),
    ("http://mlflow.tools.svc.cluster.local.:80", IN_TOOLS),
    ("http://mlflow-0.mlflow.tools.svc:80", IN_TOOLS),
    ("http://mlflow.tools", {(OUTSIDE, 80)} | (IN_TOOLS - {(Elsewhere("tools"), 80)})),
    ("http://127.0.0.1:5000", set()),
    ("http://localhost:5000", set()),
    ("http://[::1]:80", set()),
    ("http://mlflow.example.org:99999", set()),
]


def make_reward_blocks(args: dict[str, Any], url: str) -> dict[str, Any]:
    """Blocks of a run whose environment `dataset` has these arguments with the server's URL."""
    text = json.dumps({"path": "/data/rows", **args}).replace("{url}", url)
    return {"environments": [{"id": "dataset", "args": json.loads(text)}]}


def list_ways_out(edit: dict[str, Any], role: str = "orchestrator") -> set[tuple[str | Elsewhere, int]]:
    """External places and ports that a role reaches. A port open to any address appears once, with `OUTSIDE`."""
    found = list_policies(set_known_address(context(edit)))
    own, anywhere = (
        make_labels("run", role),
        {port for port in DOORS_OUT if is_allowed(found, make_labels("run", role), OUTSIDE, port)},
    )
    places = (LITERAL, Elsewhere("tools"), Elsewhere("other"))
    only = {(place, port) for place in places for port in DOORS_OUT if is_allowed(found, own, place, port)}
    return {(OUTSIDE, port) for port in anywhere} | {way for way in only if way[1] not in anywhere}


@pytest.mark.parametrize(("url", "open_ways"), NAMED, ids=[url for url, _ in NAMED])
def test_tracker_and_reward_servers_are_open_only_to_orchestrator(
    url: str, open_ways: set[tuple[str | Elsewhere, int]]
) -> None:
    for edit in ({"tracking": {"mlflow": {"uri": url}}}, *(make_reward_blocks(args, url) for args in JUDGED)):
        assert list_ways_out(edit) == open_ways
        assert list_ways_out(edit, "trainer") == list_ways_out(edit, "inference") == set()


def test_single_label_hostname_is_service_in_run_namespace() -> None:
    found = list_policies(set_known_address(context({"tracking": {"mlflow": {"uri": "http://mlflow:80"}}})))
    asks = make_labels("run", "orchestrator")
    assert is_allowed(found, asks, {"app": "mlflow"}, 5000)
    assert not is_allowed(found, asks, OUTSIDE, 80)


WANDB: list[tuple[dict[str, Any], list[dict[str, str]], set[tuple[str | Elsewhere, int]]]] = [
    (TRACKED, [], set()),
    ({"wandb": {}}, [], {(OUTSIDE, 443)}),
    ({"wandb": {"offline": True}}, [], set()),
    ({"wandb": {}}, [{"name": "WANDB_MODE", "value": "offline"}], set()),
    ({"wandb": {}}, [{"name": "WANDB_MODE", "value": "disabled"}], set()),
    ({"wandb": {"baseUrl": "http://192.0.2.7:80"}}, [], {(LITERAL, 80)}),
    ({"wandb": {}}, [{"name": "WANDB_BASE_URL", "value": "http://192.0.2.7:80"}], {(LITERAL, 80)}),
    ({"mlflow": {}}, [{"name": "MLFLOW_TRACKING_URI", "value": "http://192.0.2.7:5000"}], {(LITERAL, 5000)}),
    ({"mlflow": {}}, [{"name": "MLFLOW_TRACKING_URI", "value": "file:/data/mlruns"}], set()),
]


@pytest.mark.parametrize(("tracking", "env", "open_ways"), WANDB)
def test_tracker_egress_follows_its_fields_and_variables(
    tracking: dict[str, Any], env: list[dict[str, str]], open_ways: set[tuple[str | Elsewhere, int]]
) -> None:
    assert list_ways_out({"tracking": tracking, "orchestrator": {"env": env}}) == open_ways


def test_server_with_two_uses_has_one_rule() -> None:
    url = "http://192.0.2.7:5000"
    rules = outside_rules(context({"tracking": {"mlflow": {"uri": url}}, **make_reward_blocks(JUDGED[0], url)}).spec)
    assert len(rules) == 1


PROXIES: list[tuple[dict[str, str], set[tuple[str | Elsewhere, int]]]] = [
    ({"name": "HTTPS_PROXY", "value": "http://192.0.2.7:5000"}, {(LITERAL, 5000)}),
    ({"name": "https_proxy", "value": "192.0.2.7:5000"}, {(LITERAL, 5000)}),
    ({"name": "ALL_PROXY", "value": "http://proxy.tools.svc:80"}, IN_TOOLS),
    ({"name": "HTTP_PROXY", "value": "http://proxy.example.org"}, {(OUTSIDE, 80)}),
    ({"name": "HTTP_PROXY", "value": ""}, set()),
    ({"name": "HTTP_PROXY", "value": "http://[::"}, set()),
    ({"name": "MY_PROXY", "value": "http://192.0.2.7:5000"}, set()),
]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("variable", "open_ways"), PROXIES)
def test_role_proxy_is_open_to_that_role(
    variable: dict[str, str], open_ways: set[tuple[str | Elsewhere, int]], role: str
) -> None:
    edit = {role: {"env": [variable]}}
    assert list_ways_out(edit, role) == open_ways
    assert list_ways_out(edit, "trainer" if role == "orchestrator" else "orchestrator") == set()


def test_cluster_addresses_bypass_the_proxy() -> None:
    def exempt(env: list[dict[str, Any]], **more: Any) -> dict[str, str]:
        ctx = context({"orchestrator": {"env": env}, **more})
        return {
            v["name"]: v.get("value", "")
            for v in container(ctx, "orchestrator")["env"]
            if v["name"].upper() == "NO_PROXY"
        }

    proxy = {"name": "https_proxy", "value": "http://proxy:3128"}
    inside = "localhost,127.0.0.1,::1,.svc,.cluster.local,$(KUBERNETES_SERVICE_HOST)"
    assert exempt([]) == {}
    assert exempt([{"name": "NO_PROXY", "value": "a"}]) == {"NO_PROXY": "a"}, "without a proxy it is the user's own"
    assert exempt([proxy]) == {"NO_PROXY": inside, "no_proxy": inside}
    own = exempt(
        [proxy, {"name": "no_proxy", "value": "corp.example, .svc"}], tracking={"mlflow": {"uri": "http://mlflow:80"}}
    )
    assert own["NO_PROXY"] == own["no_proxy"] == f"corp.example,.svc,{inside.replace('.svc,', '')},mlflow"
    kept = {"name": "NO_PROXY", "valueFrom": {"configMapKeyRef": {"name": "proxy", "key": "no"}}}
    assert exempt([proxy, kept]) == {"NO_PROXY": ""}


def test_scrapers_reach_only_metrics_ports() -> None:
    peer = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    ctx = context()
    found = list_policies(replace(ctx, settings=replace(ctx.settings, network=NetworkSettings(metrics_from=(peer,)))))
    scraped = [
        (policy["podSelector"], rule["ports"])
        for policy in found
        for rule in policy.get("ingress", ())
        if rule["from"] == [peer]
    ]
    ports = [sorted(port["port"] for port in ports) for _, ports in scraped]
    assert sorted(ports) == [[8000, 29601], [9100]]
    assert all("rlrun.io/run" in selector["matchLabels"] for selector, _ in scraped)


def test_run_without_policies_gets_none_for_scrapers() -> None:
    """A first policy would close the pods to all other clients."""
    ctx = context({"networkPolicy": {"mode": "None"}})
    settings = replace(ctx.settings, network=NetworkSettings(metrics_from=({"podSelector": {}},)))
    assert list_policies(replace(ctx, settings=settings)) == []


EVERYWHERE: dict[str, Any] = {
    "model": {"name": "a/b"},
    "tracking": {"mlflow": {"uri": "http://mlflow.example.org"}},
    "networkPolicy": {"extraEgress": [{"ports": [{"protocol": "TCP", "port": 5000}]}, {}]},
}
"""A run with every kind of rule without an address."""


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "169.254.170.2", "fe80::a9fe:a9fe", "fd00:ec2::254", "fd20:ce::254"]
)
def test_cloud_metadata_is_blocked_in_rules_without_address(address: str) -> None:
    found = list_policies(context(EVERYWHERE))
    assert [port for port in (80, 443, 5000, 6443) if list_reaching_roles(found, port, address)] == []
    assert list_reaching_roles(found, 80, OUTSIDE) == list_reaching_roles(found, 443, "2001:db8::1") == set(ROLES)


def limit_egress(ctx: RunContext, *blocks: str) -> RunContext:
    policy = RunPolicy.model_validate({"egress": blocks})
    return replace(ctx, settings=replace(ctx.settings, installation=Installation(policy)))


def test_policy_limits_rules_without_address() -> None:
    found = list_policies(limit_egress(set_known_address(context(EVERYWHERE)), "198.51.100.0/24", "169.254.0.0/16"))
    assert (
        list_reaching_roles(found, 443, "198.51.100.7")
        == list_reaching_roles(found, 443, "169.254.169.254")
        == set(ROLES)
    )
    assert list_reaching_roles(found, 443, OUTSIDE) == list_reaching_roles(found, 443, "2001:db8::1") == set()
    assert not is_allowed(found, make_labels("run", "trainer"), Elsewhere("other"), 443)
    unknown = list_policies(limit_egress(context(), "198.51.100.0/24"))
    assert list_reaching_roles(unknown, 6443) == {"orchestrator"}, "the API server's address is not the policy's"
    assert list_reaching_roles(list_policies(limit_egress(context(EVERYWHERE))), 5000) == set()


BLOCK = {"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}
OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"networkPolicy": {"mode": "None"}}, "networkPolicy.mode (None)"),
    (
        {"networkPolicy": {"extraEgress": [{}, BLOCK]}},
        "networkPolicy.extraEgress[1].to[0].ipBlock.cidr (203.0.113.0/24)",
    ),
    ({"networkPolicy": {"extraEgress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]}}, "ipBlock.cidr (0.0.0.0/0)"),
    ({"tracking": {"mlflow": {"uri": "http://203.0.113.7:80"}}}, "tracking.mlflow.uri (203.0.113.7)"),
    (
        {"orchestrator": {"env": [{"name": "HTTPS_PROXY", "value": "http://203.0.113.7:1"}]}},
        "orchestrator.env[0].value (203.0.113.7)",
    ),
    (
        {"environments": [{"id": "dataset", "args": {"x": [{"base_url": "http://[2001:db8::1]/v1"}]}}]},
        "args.x[0].base_url (2001:db8::1)",
    ),
]


@pytest.mark.parametrize(("spec", "where"), OUT_OF_BOUNDS, ids=[where for _, where in OUT_OF_BOUNDS])
def test_address_out_of_bounds_is_refused_with_its_field(spec: dict[str, Any], where: str) -> None:
    limits = Installation(RunPolicy.model_validate({"egress": ["198.51.100.0/24"]}))
    (found,) = find_refusals(limits, "team-a", "run", spec)
    assert where in found
    assert "198.51.100.0/24" in found
    assert find_refusals(Installation(), "team-a", "run", spec) == []


def test_address_within_bounds_is_allowed() -> None:
    limits = Installation(RunPolicy.model_validate({"egress": ["198.51.100.0/24"]}))
    inside = {"to": [{"ipBlock": {"cidr": "198.51.100.128/25"}}, {"podSelector": {}}]}
    spec = {
        "networkPolicy": {"extraEgress": [inside]},
        "tracking": {"mlflow": {"uri": "http://198.51.100.7"}, "wandb": {"base_url": "http://127.0.0.1"}},
    }
    assert find_refusals(limits, "team-a", "run", spec) == []


@pytest.mark.parametrize("block", ["10.0.0.1/8", "10.0.0.0", "example.org/8", "10.0.0.0/33"])
def test_malformed_block_of_the_policy_is_refused(block: str) -> None:
    with pytest.raises(ValueError, match="address block"):
        RunPolicy.model_validate({"egress": [block]})
