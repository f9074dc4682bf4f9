"""Network of a run's pods: egress rules for servers outside of the run, proxies, Services and policies.

Outside servers are those of trackers and of rewards of bundled environments, and the proxies of the roles. A NetworkPolicy contains
addresses and pods, but not names. So a public name opens its port to any address, as a hub does. The name of a Service opens all ports of
the pods in its namespace: networks check a packet after its address and port were replaced by those of a pod, and only the Service contains
this port. Rules without an address get the addresses of the installation's policy, without the metadata services of clouds.

Trainer and engines have one policy, and the orchestrator has another one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from urllib.parse import urlsplit

from rlrun.api.resource import RLRunSpec
from rlrun.protocol.messages import endpoints
from rlrun.tracking.enabled import server_addresses
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, Role
from rlrun_operator.render.pod_placement import role_block
from rlrun_operator.render.render_context import RunContext, child_metadata
from rlrun_operator.restrictions import ANY_ADDRESS
from rlrun_operator.restrictions.run_policy import Network, contains_network
from rlrun_operator.state import Json, Manifest

_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_IN_CLUSTER = ("localhost", "127.0.0.1", "::1", ".svc", ".cluster.local", "$(KUBERNETES_SERVICE_HOST)")
"""Addresses that must not use a proxy. Kubernetes replaces the last one by the API server's address."""
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that Kubernetes sets on each namespace."""
PROXY_VARIABLES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})
"""Variables, in either spelling, with the URL of a proxy."""
NO_PROXY = "NO_PROXY"
METADATA = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128")
"""Link-local addresses of IPv4 and IPv6, where clouds serve credentials of the node, and the other IPv6 addresses of AWS and Google."""
_REWARD_ARGUMENTS = ("reward", "reward_args", "reward_by_source")
"""Arguments of the environment `dataset` whose `base_url` is a reward's server."""


def outside_rules(spec: RLRunSpec) -> list[Json]:
    """Return the orchestrator's egress rules for the servers in the specification, without duplicates."""
    found: list[Json] = []
    for address in outside_addresses(spec):
        found += [rule for rule in _url_rules(address) if rule not in found]
    return found


def outside_addresses(spec: RLRunSpec) -> list[str]:
    """Return the URLs of these servers. URLs in variables from a Secret or ConfigMap are unknown."""
    literal = {variable.name: variable.value for variable in spec.orchestrator.env if variable.value}
    found = server_addresses(spec.tracking, literal)
    for environment in spec.environments:
        if environment.id == "dataset":
            for argument in _REWARD_ARGUMENTS:
                found += _base_urls(environment.args.get(argument))
    return found


def proxy_rules(spec: RLRunSpec, roles: Iterable[Role]) -> list[Json]:
    """Return the egress rules for proxies in the roles' variables, without duplicates. Proxies from a Secret or ConfigMap are unknown."""
    found: list[Json] = []
    for role in roles:
        for variable in role_block(spec, role).env:
            if variable.name.upper() in PROXY_VARIABLES and variable.value:
                address = variable.value if "://" in variable.value else f"http://{variable.value}"
                found += [rule for rule in _url_rules(address) if rule not in found]
    return found


def without_proxy(spec: RLRunSpec, variables: Sequence[Json]) -> list[Json]:
    """Return the variables of a container; if they contain a proxy, with `NO_PROXY` in both spellings.

    Its value joins the value in the variables, the cluster's own names, and the Services in the specification. A value from a Secret or
    ConfigMap is not changed.
    """
    names = {str(variable["name"]).upper() for variable in variables}
    existing = [one for one in variables if str(one["name"]).upper() == NO_PROXY]
    if not names & PROXY_VARIABLES or any("valueFrom" in one for one in existing):
        return list(variables)
    given = [host for one in existing for host in str(one.get("value") or "").split(",")]
    hosts = [(urlsplit(address).hostname or "") for address in outside_addresses(spec)]
    services = [host for host in hosts if host and "." not in host]
    value = ",".join(dict.fromkeys(host.strip() for host in (*given, *_IN_CLUSTER, *services) if host.strip()))
    others = [one for one in variables if one not in existing]
    return [*others, *({"name": name, "value": value} for name in (NO_PROXY, NO_PROXY.lower()))]


def _base_urls(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "base_url" and isinstance(inner, str):
                yield inner
            else:
                yield from _base_urls(inner)
    elif isinstance(value, list):
        for item in value:
            yield from _base_urls(item)


def _url_rules(address: str) -> list[Json]:
    """Return the rules for a URL; empty for the pod itself, and for an invalid URL, which its reader refuses with its name."""
    try:
        parts = urlsplit(address)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return []
    if not host or port is None or host == "localhost":
        return []
    door: Json = {"ports": [{"protocol": "TCP", "port": port}]}
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return _host_rules(host.split("."), door)
    if ip.is_loopback or ip.is_unspecified:
        return []
    return [{"to": [{"ipBlock": {"cidr": f"{ip}/{ip.max_prefixlen}"}}], **door}]


def _host_rules(labels: list[str], door: Json) -> list[Json]:
    """Return the rules for a host name: of a Service, of the public network, or of two labels, which can be either."""
    if len(labels) == 1:
        return [_pod_rule({"podSelector": {}})]
    if "svc" in labels[2:]:
        return [_in_namespace(labels[labels.index("svc", 2) - 1])]
    return [door, _in_namespace(labels[1])] if len(labels) == 2 else [door]


def _in_namespace(name: str) -> Json:
    return _pod_rule({"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: name}}})


def _pod_rule(peer: Json) -> Json:
    return {"to": [peer], "ports": [{"protocol": "TCP"}]}


def with_addresses(rules: Iterable[Json], allowed: Sequence[str]) -> list[Json]:
    """Return egress rules in which every rule without a peer has the allowed addresses.

    Args:
        rules: egress rules of a NetworkPolicy.
        allowed: blocks of addresses. All addresses include the pods of the cluster, which some networks do not match by address blocks.
    """
    peers = _address_peers(allowed)
    found = []
    for rule in rules:
        if rule.get("to"):
            found.append(rule)
        elif peers:  # an empty list of peers would open all addresses
            found.append({"to": peers, **{key: rule[key] for key in rule if key != "to"}})
    return found


def _address_peers(allowed: Sequence[str]) -> list[Json]:
    blocks = [_address_block(cidr) for cidr in allowed]
    pods: list[Json] = [{"namespaceSelector": {}}] if set(allowed) == set(ANY_ADDRESS) else []
    return [*blocks, *pods]


def _address_block(cidr: str) -> Json:
    shown, left_out = _split_block(cidr)
    return {"ipBlock": {"cidr": shown, **({"except": list(left_out)} if left_out else {})}}


@cache  # the blocks of an installation: reading them took a ninth of each decision
def _split_block(cidr: str) -> tuple[str, tuple[str, ...]]:
    """Return the block in its usual form, and the metadata addresses inside of it."""
    network = ipaddress.ip_network(cidr)
    return str(network), tuple(inner for inner in METADATA if _is_within(ipaddress.ip_network(inner), network))


def _is_within(inner: Network, outer: Network) -> bool:
    """Return whether a network is a proper part of another one. An administrator who lists exactly the metadata addresses allows them."""
    return inner != outer and contains_network(outer, inner)


HUB_PORT = 443
"""Port of model hubs and their storage servers, whose addresses change."""


def render_services(ctx: RunContext) -> list[Manifest]:
    """Return the headless Services: DNS names of the trainer's pods, and one DNS name for all engines.

    A guest has no Services. Both publish pods that are not ready: trainer pods connect to each other before they are ready, and an engine
    is ready only after the orchestrator has sent it weights.
    """
    found = []
    if ctx.has_trainer:
        trainer = [_named_port("channel", endpoints.TRAINER_PORT), _named_port("rendezvous", endpoints.RENDEZVOUS_PORT)]
        found.append(_headless_service(ctx, ctx.names.trainer, "trainer", trainer))
    engines = [_named_port("http", endpoints.ENGINE_PORT)]
    if ctx.has_engines:
        found.append(_headless_service(ctx, ctx.names.inference, "inference", engines))
    if ctx.colocated:
        found.append(_headless_service(ctx, ctx.names.inference, "trainer", engines))
    return found


def _headless_service(ctx: RunContext, name: str, role: Role, ports: list[dict[str, object]]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(ctx, name, role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: ctx.name, ROLE_LABEL: role},
            "ports": ports,
        },
    }


def _named_port(name: str, number: int) -> dict[str, object]:
    return {"name": name, "port": number, "protocol": "TCP"}


def network_policies(ctx: RunContext) -> list[Manifest]:
    """Return the policies of the run's pods, by role and port; they block all other traffic.

    Policies are additive: a policy of the user can allow more.
    """
    if ctx.spec.network_policy.mode == "None":
        return _host_access(ctx)
    servers = [_server_policies(ctx), *_reference_access(ctx)] if ctx.host is None else []
    return [*_host_access(ctx), *servers, orchestrator_policy(ctx)]


def orchestrator_policy(ctx: RunContext) -> Manifest:
    """Return the policy of the orchestrator. Only metrics scrapers can connect to it. It can connect to the trainer's channel, the engines,
    the API server for its Lease, the servers of trackers and rewards, and its proxy."""
    serving = ctx.name if ctx.host is None else ctx.host.name
    doors = [({"podSelector": _pod_peer(serving, "trainer")}, endpoints.TRAINER_PORT)]
    engines: Role = (
        "trainer" if (ctx.colocated if ctx.host is None else ctx.host.spec.placement.colocate) else "inference"
    )
    doors.append(({"podSelector": _pod_peer(serving, engines)}, endpoints.ENGINE_PORT))
    egress: list[Json] = [{"to": [peer], **_tcp_ports(port)} for peer, port in doors]
    if _data_of_the_hub(ctx) or any(
        _reads_hub(environment.id, environment.args) for environment in ctx.spec.environments
    ):
        egress.append(_tcp_ports(HUB_PORT))
    outside = [*outside_rules(ctx.spec), *proxy_rules(ctx.spec, ["orchestrator"])]
    egress += [rule for i, rule in enumerate(outside) if rule not in (*egress, *outside[:i])]
    both = _both_ways(ctx, _scraper_rules(ctx, endpoints.ORCHESTRATOR_PORT), egress)
    # The installation's policy for runs does not limit the connection to the API server, because it may not contain this address.
    both["egress"] += [
        rule for rule in with_addresses(ctx.settings.network.api_server, ANY_ADDRESS) if rule not in both["egress"]
    ]
    spec = {"podSelector": _pod_peer(ctx.name, "orchestrator"), **both}
    return _network_policy(child_metadata(ctx, ctx.names.orchestrator_access, "orchestrator"), spec)


def _server_policies(ctx: RunContext) -> Manifest:
    """Return the policy of trainer and engines: trainer pods can connect to each other, and the orchestrator to the two ports that need
    the key."""
    trainers = {"podSelector": _pod_peer(ctx.name, "trainer")}
    group = [trainers]
    if ctx.spec.weight_sync.transport == "NCCL" and ctx.has_engines:  # NCCL uses ports that the system selects
        group.append({"podSelector": _pod_peer(ctx.name, "inference")})
    asks = {"podSelector": _pod_peer(ctx.name, "orchestrator")}
    doors = _tcp_ports(endpoints.TRAINER_PORT, endpoints.ENGINE_PORT)
    ingress = [
        {"from": group},
        {"from": [asks], **doors},
        *_scraper_rules(ctx, endpoints.ENGINE_PORT, endpoints.POD_PORT),
    ]
    egress = [{"to": group}, *proxy_rules(ctx.spec, ["trainer", "inference"])]
    spec = {"podSelector": _role_selector(ctx.name), **_both_ways(ctx, ingress, egress)}
    return _network_policy(child_metadata(ctx, ctx.names.account), spec)


def _both_ways(ctx: RunContext, ingress: Sequence[Manifest], egress: Sequence[Json]) -> Json:
    """Return types and rules of a policy, with the egress rules of all pods of the run."""
    hub = [_tcp_ports(HUB_PORT)] if ctx.spec.model.name is not None else []
    common = [*ctx.settings.network.dns, *hub, *ctx.spec.network_policy.extra_egress]
    comes_in = {"ingress": ingress} if ingress else {}  # an empty list would make each apply a change
    allowed = ctx.settings.installation.policy.egress
    return {"policyTypes": ["Ingress", "Egress"], **comes_in, "egress": with_addresses([*egress, *common], allowed)}


def _scraper_rules(ctx: RunContext, *ports: int) -> list[Json]:
    """Return the rules for the metrics scrapers in the chart's values."""
    peers = ctx.settings.network.metrics_from
    return [{"from": list(peers), **_tcp_ports(*ports)}] if peers else []


def _reference_access(ctx: RunContext) -> list[Manifest]:
    """Return the trainer's policy for the hub, if not the run's model but its reference or a tiny model's warm-up is read from it."""
    if not ctx.has_trainer or ctx.spec.model.name is not None:
        return []
    reference, tiny = ctx.spec.algorithm.reference, ctx.spec.model.tiny
    fetched = reference is not None and reference.resolve_model(ctx.spec.model).name is not None
    if not fetched and (tiny is None or not _reads_hub(tiny.warmup_environment, tiny.warmup_args)):
        return []
    egress = with_addresses([_tcp_ports(HUB_PORT)], ctx.settings.installation.policy.egress)
    spec = {"podSelector": _pod_peer(ctx.name, "trainer"), "policyTypes": ["Egress"], "egress": egress}
    return [_network_policy(child_metadata(ctx, ctx.names.reference_access, "trainer"), spec)]


def _host_access(ctx: RunContext) -> list[Manifest]:
    """Return a guest's policy for its host's pods: it is deleted with the guest, and the host's policies stay unchanged.

    If the host has no policies, the guest has none either: a first policy would block all other traffic to the host's pods.
    """
    host = ctx.host
    if host is None or host.spec.network_policy.mode == "None":
        return []
    guest = {"podSelector": _pod_peer(ctx.name, "orchestrator")}
    ports = _tcp_ports(endpoints.TRAINER_PORT, endpoints.ENGINE_PORT)
    spec = {
        "podSelector": _role_selector(host.name),
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [guest], **ports}],
    }
    return [_network_policy(child_metadata(ctx, ctx.names.host_access, "orchestrator"), spec)]


def _pod_peer(run: str, role: Role) -> Json:
    return {"matchLabels": {RUN_LABEL: run, ROLE_LABEL: role}}


def _role_selector(run: str) -> Json:
    """Return the selector of a run's trainer and engines."""
    among = {"key": ROLE_LABEL, "operator": "In", "values": ["trainer", "inference"]}
    return {"matchLabels": {RUN_LABEL: run}, "matchExpressions": [among]}


def _data_of_the_hub(ctx: RunContext) -> bool:
    data = ctx.spec.data
    if data is None:
        return False
    return any(place is not None and place.name is not None for place in (*data.sources, data.validation))


def _reads_hub(id: str | None, args: Mapping[str, object]) -> bool:
    """Return whether a bundled environment reads a data set of the hub; other environments need `extraEgress`."""
    if id == "gsm8k":
        return args.get("source", "hub") == "hub" and args.get("path") is None
    return id == "dataset" and args.get("name") is not None


def _network_policy(meta: Json, spec: Json) -> Manifest:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}


def _tcp_ports(*ports: int) -> Json:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
