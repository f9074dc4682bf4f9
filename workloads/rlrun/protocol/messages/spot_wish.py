"""Number and addresses of engines on interruptible nodes: an annotation that the operator writes (`annotations.ENGINES_SPOT`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SpotWish:
    """Wanted engines on interruptible nodes."""

    engines: int
    hosts: frozenset[str]
    """Hosts of the engines on such nodes."""

    @classmethod
    def read(cls, text: str) -> SpotWish:
        """Parse the annotation.

        Raises:
            ValueError: it does not start with a number.
        """
        number, *hosts = text.split() or [""]
        return cls(max(0, int(number)), frozenset(map(plain_host, hosts)))

    @classmethod
    def from_hosts(cls, engines: int, hosts: Iterable[str]) -> SpotWish:
        """Return the wish with each address in canonical form."""
        return cls(engines, frozenset(map(plain_host, hosts)))

    def text(self) -> str:
        """Return the text of the annotation."""
        return " ".join([str(self.engines), *sorted(self.hosts)])


def plain_host(host: str) -> str:
    """Return an address in canonical form, or a name unchanged."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
