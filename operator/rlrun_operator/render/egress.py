"""Addresses behind egress rules that name none: what the installation's policy allows, without the metadata services of clouds."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from rlrun_operator.restrictions import ANY_ADDRESS
from rlrun_operator.state import Json

METADATA = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128")
"""Link-local addresses of IPv4 and IPv6, where clouds hand out credentials of the node, and the other IPv6 addresses of AWS and Google."""


def with_addresses(rules: Iterable[Json], allowed: Sequence[str]) -> list[Json]:
    """Return egress rules in which every rule without a peer has the allowed addresses.

    Args:
        rules: of a NetworkPolicy.
        allowed: blocks of addresses. All addresses include the pods of the cluster, which some networks do not count among addresses.
    """
    peers = _peers(allowed)
    found = []
    for rule in rules:
        if rule.get("to"):
            found.append(rule)
        elif peers:  # an empty list of peers would open all addresses
            found.append({"to": peers, **{key: rule[key] for key in rule if key != "to"}})
    return found


def _peers(allowed: Sequence[str]) -> list[Json]:
    blocks = [_block(ipaddress.ip_network(cidr)) for cidr in allowed]
    pods: list[Json] = [{"namespaceSelector": {}}] if set(allowed) == set(ANY_ADDRESS) else []
    return [*blocks, *pods]


def _block(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> Json:
    left_out = [cidr for cidr in METADATA if _within(ipaddress.ip_network(cidr), network)]
    return {"ipBlock": {"cidr": str(network), **({"except": left_out} if left_out else {})}}


def _within(
    inner: ipaddress.IPv4Network | ipaddress.IPv6Network, outer: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> bool:
    """True if a network is a proper part of another one: an administrator who lists metadata addresses opens them."""
    return inner.version == outer.version and inner != outer and outer.supernet_of(inner)  # type: ignore[arg-type]
