"""Address of the sender of a request: from the connection, or from the headers of trusted proxies."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_SITE_BITS = 64
"""Prefix length of IPv6 limits; a single user controls the lower bits."""
_HOPS_MAX = 32


def parse_networks(words: Sequence[str]) -> tuple[Network, ...]:
    """Parse networks such as `10.0.0.0/8`, or single addresses.

    Raises:
        ValueError: a network is invalid, or has bits behind its prefix; the message contains it.
    """
    found = []
    for word in words:
        try:
            found.append(ip_network(word))
        except ValueError as error:
            raise ValueError(f"{error}; use a network such as 10.244.0.0/16, or a single address") from None
    return tuple(found)


def peer_of(scope: Scope, trusted: Sequence[Network] = ()) -> str:
    """Return the sender's address for rate limits; for IPv6 its /64 network.

    `X-Forwarded-For` is used as far as trusted proxies wrote it: from the end, each entry is the address that the proxy behind it saw. The
    first entry that is not a trusted proxy is the sender; any sender can forge the entries before it.

    Args:
        scope: ASGI scope of the request.
        trusted: networks of trusted proxies.
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
    """Parse an address with an optional port; returns None if it is invalid."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    if (
        isinstance(found, IPv6Address) and found.ipv4_mapped is not None
    ):  # the form of IPv4 clients at a listener on `::`
        return found.ipv4_mapped
    return found


def _peer_name(address: Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((address.packed, _SITE_BITS), strict=False))
