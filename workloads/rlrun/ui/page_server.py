"""Server of the page: socket, token, and the printed URL."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from rlrun.ui.app import make_app
from rlrun.ui.guard import LOOPBACK, Guard, Redactor
from rlrun.ui.live import Feed
from rlrun.ui.run_registry import Registry
from rlrun.ui.shown import FolderRuns
from rlrun.ui.static_files import StaticFiles

_GRACE_SECONDS = 2
"""Seconds before open connections are closed at the end; event streams never end by themselves."""


@dataclass(frozen=True)
class Address:
    """Address to listen on.

    Attributes:
        host: name or address of this machine.
        port: port; 0 selects a free port.
        token: whether a token is required on loopback, too.
    """

    host: str
    port: int
    token: bool

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def guard_app(app: ASGIApp, address: Address, port: int, token: str | None) -> Guard:
    """Return the application with its checks: host names on loopback, a token on other addresses."""
    names = {*LOOPBACK, _in_url(address.host).lower()} if address.is_loopback else None
    return Guard(app, names=names, token=token, port=port)


def serve_page(folders: Sequence[Path], address: Address, say: Callable[[str], None], *, seconds: float = 1.0) -> None:
    """Serve until a signal arrives.

    Args:
        folders: existing folders of runs, or folders that directly contain runs.
        address: address to listen on.
        say: function that prints the page's URL as soon as it is served.
        seconds: time between two scans for changes.

    Raises:
        OSError: the address is not available, or the installation does not contain the page.
    """
    static = StaticFiles()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.create_server((address.host, address.port), family=family)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24) if address.token or not address.is_loopback else None
    registry, redactor = Registry(folders), Redactor(os.environ)
    runs, feed = FolderRuns(registry, [str(folder) for folder in folders]), Feed(registry.fingerprint_runs, seconds)
    app = make_app(lambda _request: runs, redactor, static, feed)
    config = uvicorn.Config(
        guard_app(app, address, port, token),
        log_level="warning",
        access_log=False,  # the access log would contain the token
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    name = socket.gethostname() if address.host in ("0.0.0.0", "::") else address.host
    say(f"http://{_in_url(name)}:{port}/{'?token=' + token if token else ''}")
    uvicorn.Server(config).run(sockets=[listener])


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
