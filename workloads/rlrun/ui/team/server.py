"""Server of a team's page: its settings, and how its parts are put together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rlrun.inspect.kubectl import ClusterError
from rlrun.ui.app import make_app
from rlrun.ui.live import Feed
from rlrun.ui.secrets import Redactor
from rlrun.ui.static_files import StaticFiles
from rlrun.ui.team.api_server import CREDENTIALS, Api, ApiServer, request_error
from rlrun.ui.team.callers import Callers, Rights, SignedOutError, TooManyError
from rlrun.ui.team.cluster_runs import ClusterRuns, TeamRuns, Volumes
from rlrun.ui.team.gate import Gate, refuse_anonymous
from rlrun.ui.team.peers import Network
from rlrun.ui.team.sessions import Sessions

_GRACE_SECONDS = 2


@dataclass(frozen=True)
class Settings:
    """Settings of a team's page.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        namespaces: whose runs are shown; empty: those of all.
        audiences: tokens must be meant for one of them; empty: for the API server.
        prefix: path under which an ingress has the page.
        claims: (namespace, claim) -> folder where it is mounted.
        trusted: proxies whose `X-Forwarded-For` counts.
        keep_seconds: time for which the API server's word about a user is used again.
        seconds: time between two looks for changes.
    """

    host: str = "::"
    port: int = 8080
    namespaces: tuple[str, ...] = ()
    audiences: tuple[str, ...] = ()
    prefix: str = ""
    claims: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    trusted: tuple[Network, ...] = ()
    keep_seconds: float = 30.0
    seconds: float = 2.0


def make_team_app(api: Api, settings: Settings, static: StaticFiles, redactor: Redactor) -> ASGIApp:
    """The guarded application."""
    runs = ClusterRuns(api, settings.namespaces, Volumes(settings.claims))
    rights = Rights(api, settings.keep_seconds)

    def runs_of(request: Request) -> TeamRuns:
        state = request.scope.get("state", {})
        if "caller" not in state:  # the gate lets nobody through without; a route that it does not know shows nothing
            raise SignedOutError("log in with a token of the cluster")
        return TeamRuns(runs, rights, state["caller"], state["again"])

    feed = Feed(runs.fingerprints, settings.seconds, passing=(OSError, ClusterError))
    app = make_app(runs_of, redactor, static, feed)
    for kind in (SignedOutError, TooManyError, ClusterError):
        app.add_exception_handler(kind, _refused_answer)
    callers = Callers(api, settings.audiences, settings.keep_seconds)
    return Gate(app, callers, Sessions(), _readiness_answer(runs), settings.prefix, settings.trusted)


def _refused_answer(_request: Request, error: Exception) -> Response:
    return refuse_anonymous(error)


def _readiness_answer(runs: ClusterRuns) -> Callable[[], str | None]:
    """Ready once runs could be listed: later outages are said on the page, which an ingress would else replace by its own words."""
    listed = False

    def why() -> str | None:
        nonlocal listed
        if not listed:
            try:
                runs.all()
            except ClusterError as error:
                return request_error(error)
            listed = True
        return None

    return why


def serve_team(settings: Settings, url: str, say: Callable[[str], None], credentials: Path = CREDENTIALS) -> None:
    """Serve until a signal.

    Args:
        settings: of the page.
        url: of the API server.
        say: prints the address, once it is served.
        credentials: folder of the account's `token` and `ca.crt`.

    Raises:
        OSError: the address cannot be listened on, or the installation has no page.
        ValueError: the URL is none of an API server.
    """
    app = make_team_app(ApiServer(url, credentials), settings, StaticFiles(), Redactor(os.environ))
    listener = _open_socket(settings.host, settings.port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the gate reads them, where a proxy is trusted
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"http://{host}:{listener.getsockname()[1]}{settings.prefix.rstrip('/')}/")
    uvicorn.Server(config).run(sockets=[listener])


def _open_socket(host: str, port: int) -> socket.socket:
    if host == "::" and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    if host == "::":  # a machine without IPv6
        return socket.create_server(("0.0.0.0", port))
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def api_url(environment: Mapping[str, str]) -> str | None:
    """The API server, as Kubernetes tells each pod; None: this is no pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def claims_of(words: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Claims of `NAMESPACE/CLAIM=FOLDER`.

    Raises:
        ValueError: one is written otherwise; names it.
    """
    found = {}
    for word in words:
        name, equals, folder = word.partition("=")
        namespace, slash, claim = name.partition("/")
        if not (namespace and slash and claim and equals and Path(folder).is_absolute()):
            raise ValueError(f"{word} is no NAMESPACE/CLAIM=FOLDER with a folder from the root")
        found[namespace, claim] = Path(folder)
    return found
