"""Address of the one who sent a request: of the connection, or as proxies name it that are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_SITE_BITS = 64
"""One IPv6 user has so many low bits to choose from."""
_HOPS_MAX = 32


def parse_networks(words: Sequence[str]) -> tuple[Network, ...]:
    """Networks of `10.0.0.0/8`, or of one address.

    Raises:
        ValueError: one is written otherwise, or has bits behind its prefix; names it.
    """
    found = []
    for word in words:
        try:
            found.append(ip_network(word))
        except ValueError as error:
            raise ValueError(f"{error}; write a network such as 10.244.0.0/16, or one address") from None
    return tuple(found)


def peer_of(scope: Scope, trusted: Sequence[Network] = ()) -> str:
    """Address for limits: of an IPv6 address its /64.

    `X-Forwarded-For` counts as far as trusted proxies have written it: from its end, each entry is the address that the proxy behind it
    has seen. The first that is no trusted proxy is the sender; what stands before it anybody can have written.

    Args:
        scope: of the request.
        trusted: proxies.
    """
    client = scope.get("client")
    if not client:
        return "nobody"
    seen = _parse_address(str(client[0]))
    if seen is None:
        return str(client[0])
    hops = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    for hop in reversed(hops[-_HOPS_MAX:]):
        if not _trusts_peer(trusted, seen):
            break
        before = _parse_address(hop)
        if before is None:
            break
        seen = before
    return _peer_name(seen)


def _trusts_peer(trusted: Sequence[Network], address: Address) -> bool:
    return any(address in network for network in trusted)


def _parse_address(text: str) -> Address | None:
    """An address, which may have a port; None: it is none."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:  # a listener on `::` sees IPv4 so
        return found.ipv4_mapped
    return found


def _peer_name(address: Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((address.packed, _SITE_BITS), strict=False))
