"""Name of the network interface with an address: libraries for collectives need names, not addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 or IPv6 address, or None."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.version == 6:
        return _interface6(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == str(wanted):
                return name
    return None


def _interface6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, *_, name = line.split()
        if ipaddress.ip_address(bytes.fromhex(digits)) == wanted:
            return name
    return None
