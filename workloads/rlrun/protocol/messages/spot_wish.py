"""Number and addresses of the engines on interruptible nodes: what the operator writes into the Lease (`annotations.ENGINES_SPOT`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SpotWish:
    """Engines that are to be in use on interruptible nodes."""

    engines: int
    hosts: frozenset[str]
    """Hosts of the engines that are on such nodes."""

    @classmethod
    def read(cls, text: str) -> SpotWish:
        """Read what the Lease says.

        Raises:
            ValueError: it begins with no number.
        """
        number, *hosts = text.split() or [""]
        return cls(max(0, int(number)), frozenset(map(plain_host, hosts)))

    @classmethod
    def of(cls, engines: int, hosts: Iterable[str]) -> SpotWish:
        """The wish with each address in its one form."""
        return cls(engines, frozenset(map(plain_host, hosts)))

    def text(self) -> str:
        """Text of the Lease's annotation."""
        return " ".join([str(self.engines), *sorted(self.hosts)])


def plain_host(host: str) -> str:
    """An address in its one form; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
