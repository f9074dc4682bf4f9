"""NetworkPolicies as one nftables table: a pure function of pods, namespaces and policies.

Covered: podSelector and namespaceSelector with expressions, ipBlock with except, ports by number, range and name, TCP,
UDP and SCTP, both directions. A pod that a policy selects has a chain for that direction: allowed packets return to the
hook, all others are dropped. Traffic of a node itself (probes, the kubelet) passes no hook of the table, as Kubernetes
requires.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
TABLE = "networkpolicy"


@dataclass(frozen=True)
class Peer:
    """A pod as policies see it.

    Attributes:
        namespace_labels: labels of its namespace.
        ports: number by (protocol in lower case, name).
    """

    namespace: str
    labels: dict[str, str]
    namespace_labels: dict[str, str]
    ip: str
    ports: dict[tuple[str, str], int]


def peers(
    pods: Iterable[Object], namespaces: Iterable[Object], pod_range: str, extra: Iterable[Object] = ()
) -> list[Peer]:
    """Return the pods with a network of their own inside `pod_range` that may still send.

    Args:
        extra: pods to add regardless of their address: processes that represent the pods of an ordinary cluster.
    """
    labels = {space["metadata"]["name"]: space["metadata"].get("labels") or {} for space in namespaces}
    network = ipaddress.ip_network(pod_range)
    return [
        *(_peer(pod, labels) for pod in pods if _has_address_in(pod, network)),
        *(_peer(pod, labels) for pod in extra),
    ]


def _has_address_in(pod: Object, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    address = pod["status"].get("podIP")
    alive = pod["status"].get("phase") in ("Pending", "Running")
    return bool(address) and alive and ipaddress.ip_address(address) in network and not pod["spec"].get("hostNetwork")


def _peer(pod: Object, namespace_labels: dict[str, dict[str, str]]) -> Peer:
    meta = pod["metadata"]
    containers = [*pod["spec"].get("containers", []), *pod["spec"].get("initContainers", [])]
    ports = {
        (port.get("protocol", "TCP").lower(), port["name"]): port["containerPort"]
        for container in containers
        for port in container.get("ports") or []
        if "name" in port
    }
    space = meta["namespace"]
    return Peer(space, meta.get("labels") or {}, namespace_labels.get(space, {}), pod["status"]["podIP"], ports)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches these labels; the empty one matches all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for expression in selector.get("matchExpressions") or []:
        key, values = expression["key"], expression.get("values") or []
        holds = {
            "In": key in labels and labels[key] in values,
            "NotIn": key not in labels or labels[key] not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }
        if not holds[expression["operator"]]:
            return False
    return True


def rules(known: Sequence[Peer], policies: Sequence[Object]) -> str:
    """Return the text that replaces the table when `nft -f` reads it."""
    jumps: dict[str, list[str]] = {"ingress": [], "egress": []}
    chains: list[str] = []
    for pod in sorted(known, key=lambda peer: peer.ip):
        mine = [
            policy
            for policy in policies
            if policy["metadata"]["namespace"] == pod.namespace
            and selects(policy["spec"].get("podSelector") or {}, pod.labels)
        ]
        for direction, own in (("ingress", "daddr"), ("egress", "saddr")):
            active = [policy for policy in mine if direction.capitalize() in policy_types(policy)]
            if not active:
                continue
            name = f"{direction}_{pod.ip.replace('.', '_')}"
            jumps[direction].append(f"ip {own} {pod.ip} jump {name}")
            allowed = dict.fromkeys(line for policy in active for line in _allowed(policy, direction, pod, known))
            chains.append(_chain(name, [*allowed, "counter drop"]))
    hooks = [
        _hook("forward", [*jumps["egress"], *jumps["ingress"]]),
        _hook("input", jumps["egress"]),  # from a pod to the node itself
    ]
    return "\n".join(
        [f"table ip {TABLE}", f"delete table ip {TABLE}", f"table ip {TABLE} {{", *chains, *hooks, "}", ""]
    )


def policy_types(policy: Object) -> list[str]:
    """Return the directions that a policy restricts, by default those of Kubernetes."""
    spec = policy["spec"]
    default = ["Ingress", "Egress"] if "egress" in spec else ["Ingress"]
    return spec.get("policyTypes") or default


def _allowed(policy: Object, direction: str, pod: Peer, known: Sequence[Peer]) -> Iterable[str]:
    other = "saddr" if direction == "ingress" else "daddr"
    side = "from" if direction == "ingress" else "to"
    for rule in policy["spec"].get(direction) or []:
        for match, targets in _sources(rule.get(side), other, policy["metadata"]["namespace"], known):
            for port in _ports(rule.get("ports"), [pod] if direction == "ingress" else targets):
                yield " ".join(part for part in (match, port, "return") if part)


def _sources(
    listed: list[Object] | None, other: str, namespace: str, known: Sequence[Peer]
) -> Iterable[tuple[str, Sequence[Peer]]]:
    """Return match expressions of a rule's other side, each with its pods, which resolve port names."""
    if not listed:
        yield "", known
        return
    for entry in listed:
        if block := entry.get("ipBlock"):
            without = ", ".join(block.get("except") or [])
            yield f"ip {other} {block['cidr']}" + (f" ip {other} != {{ {without} }}" if without else ""), ()
            continue
        chosen = [peer for peer in known if _matches(entry, namespace, peer)]
        if chosen:
            yield f"ip {other} {{ {', '.join(sorted({peer.ip for peer in chosen}))} }}", chosen


def _matches(entry: Object, namespace: str, peer: Peer) -> bool:
    spaces = entry.get("namespaceSelector")
    in_space = peer.namespace == namespace if spaces is None else selects(spaces, peer.namespace_labels)
    return in_space and selects(entry.get("podSelector") or {}, peer.labels)


def _ports(listed: list[Object] | None, targets: Sequence[Peer]) -> Iterable[str]:
    if not listed:
        yield ""
        return
    for entry in listed:
        protocol, port = entry.get("protocol", "TCP").lower(), entry.get("port")
        if port is None:
            yield f"meta l4proto {protocol}"
        elif isinstance(port, str):
            numbers = {peer.ports[protocol, port] for peer in targets if (protocol, port) in peer.ports}
            yield from (f"{protocol} dport {number}" for number in sorted(numbers))
        else:
            yield f"{protocol} dport {port}" + (f"-{entry['endPort']}" if "endPort" in entry else "")


def _chain(name: str, lines: Iterable[str]) -> str:
    return "\n".join([f" chain {name} {{", *(f"  {line}" for line in lines), " }"])


def _hook(name: str, lines: Iterable[str]) -> str:
    head = f"type filter hook {name} priority -10; policy accept;"
    return _chain(name, [head, "ct state established,related accept", *lines])
