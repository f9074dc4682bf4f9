"""Check of the external addresses that a run names against the policy's egress blocks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from rlrun_operator.restrictions.run_policy import RunPolicy

_FIX = "name an address within one of them, or ask the administrator of the operator to allow it"


def refused_egress(policy: RunPolicy, spec: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each forbidden address of a specification, with its field and a fix.

    Host names are not checked: the network rules for them open only the allowed addresses.

    Args:
        policy: policy with its address blocks.
        spec: specification from the API server.
    """
    if not policy.limits_egress:
        return
    blocks = ", ".join(policy.egress) or "none"
    network = spec.get("networkPolicy")
    if isinstance(network, Mapping):
        if network.get("mode") == "None":
            yield f"networkPolicy.mode (None) opens all addresses, and policy.egress allows {blocks}; remove it"
        for path, cidr in _address_blocks(network.get("extraEgress")):
            if not policy.allows_block(cidr):
                yield f"networkPolicy.{path} ({cidr}) is not within policy.egress ({blocks}); {_FIX}"
    for path, text in _list_texts(spec, ""):
        address = _url_address(text)
        if address is not None and not policy.allows_block(address):
            yield f"{path} ({address}) is not within policy.egress ({blocks}); {_FIX}"


def _address_blocks(rules: object) -> Iterator[tuple[str, str]]:
    for i, rule in enumerate(rules if isinstance(rules, list) else ()):
        peers = rule.get("to") if isinstance(rule, Mapping) else None
        for j, peer in enumerate(peers if isinstance(peers, list) else ()):
            block = peer.get("ipBlock") if isinstance(peer, Mapping) else None
            if isinstance(block, Mapping):
                yield f"extraEgress[{i}].to[{j}].ipBlock.cidr", str(block.get("cidr"))


def _list_texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _list_texts(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _list_texts(one, f"{path}[{i}]")


def _url_address(text: str) -> str | None:
    """Return the address in a URL, or None for a host name, a local address or another text."""
    if "://" not in text:
        return None
    try:
        found = ipaddress.ip_address(urlsplit(text.strip()).hostname or "")
    except ValueError:
        return None
    return None if found.is_loopback or found.is_unspecified else str(found)
