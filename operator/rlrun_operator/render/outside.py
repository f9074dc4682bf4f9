"""Egress rules for servers outside of a run: trackers, rewards of bundled environments, and proxies of the roles.

A NetworkPolicy contains addresses and pods, but not names. So a public name opens its port to any address, as a hub does. The name of a
Service opens all ports of the pods in its namespace: networks check a packet after its address and port were replaced by those of a pod,
and only the Service contains this port.

Rules without an address get the addresses of the installation's policy, without the metadata services of clouds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from urllib.parse import urlsplit

from rlrun.api.resource import RLRunSpec
from rlrun.tracking.enabled import server_addresses
from rlrun_operator.names import Role
from rlrun_operator.render.placement import role_block
from rlrun_operator.restrictions import ANY_ADDRESS
from rlrun_operator.state import Json

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


def _is_within(
    inner: ipaddress.IPv4Network | ipaddress.IPv6Network, outer: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> bool:
    """Return whether a network is a proper part of another one. An administrator who lists exactly the metadata addresses allows them."""
    return inner.version == outer.version and inner != outer and outer.supernet_of(inner)  # type: ignore[arg-type]
