"""Addresses at which processes accept connections."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """Return addresses, without ports, at which the processes listen for TCP connections; an ended process has none."""
    found: set[str] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= set(_addresses(pid))
    return found


def _addresses(pid: int) -> Iterator[str]:
    own = set(_sockets(pid))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and rest[5] in own:
                yield str(_address(local.split(":")[0]))


def _sockets(pid: int) -> Iterator[str]:
    """Return inodes of a process's sockets."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address of /proc/net: words of 32 bits in the machine's order."""
    raw = b"".join(struct.pack("<I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    address = ipaddress.ip_address(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw))
    return getattr(address, "ipv4_mapped", None) or address
