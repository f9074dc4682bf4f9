"""Server of a team's page: its settings and the assembly of its parts."""

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
from rlrun.ui.guard import Redactor
from rlrun.ui.live import Feed
from rlrun.ui.static_files import StaticFiles
from rlrun.ui.team.callers import Callers, Rights, Sessions, SignedOutError, TooManyError
from rlrun.ui.team.cluster_api import CREDENTIALS, Api, ApiServer, request_error
from rlrun.ui.team.cluster_runs import ClusterRuns, TeamRuns, Volumes
from rlrun.ui.team.gate import Gate, Network, refuse_anonymous

_GRACE_SECONDS = 2


@dataclass(frozen=True)
class Settings:
    """Settings of a team's page.

    Attributes:
        host: address to listen on.
        port: port; 0 selects a free port.
        namespaces: namespaces whose runs are shown; empty: all.
        audiences: accepted audiences of tokens; empty: the audience of the API server.
        prefix: path of the page behind an ingress.
        claims: (namespace, claim) -> folder where it is mounted.
        trusted: proxies whose `X-Forwarded-For` is used.
        keep_seconds: time for which reviews of a user are cached.
        seconds: time between two scans for changes.
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
    """Return the application with its gate."""
    runs = ClusterRuns(api, settings.namespaces, Volumes(settings.claims))
    rights = Rights(api, settings.keep_seconds)

    def runs_of(request: Request) -> TeamRuns:
        state = request.scope.get("state", {})
        if "caller" not in state:  # the gate always sets a caller; this is a second protection for unknown routes
            raise SignedOutError("log in with a token of the cluster")
        return TeamRuns(runs, rights, state["caller"], state["current_caller"])

    feed = Feed(runs.fingerprint_runs, settings.seconds, passing=(OSError, ClusterError))
    app = make_app(runs_of, redactor, static, feed)
    for kind in (SignedOutError, TooManyError, ClusterError):
        app.add_exception_handler(kind, _refused_answer)
    callers = Callers(api, settings.audiences, settings.keep_seconds)
    return Gate(app, callers, Sessions(), _readiness_answer(runs), settings.prefix, settings.trusted)


def _refused_answer(_request: Request, error: Exception) -> Response:
    return refuse_anonymous(error)


def _readiness_answer(runs: ClusterRuns) -> Callable[[], str | None]:
    """Return a readiness check. Once runs were listed it stays ready: later outages appear on the page, not as an error of the ingress."""
    listed = False

    def explain_unready() -> str | None:
        nonlocal listed
        if not listed:
            try:
                runs.list_runs()
            except ClusterError as error:
                return request_error(error)
            listed = True
        return None

    return explain_unready


def serve_team(settings: Settings, url: str, say: Callable[[str], None], credentials: Path = CREDENTIALS) -> None:
    """Serve until a signal arrives.

    Args:
        settings: settings of the page.
        url: URL of the API server.
        say: function that prints the address as soon as it is served.
        credentials: folder with the account's `token` and `ca.crt`.

    Raises:
        OSError: the address is not available, or the installation does not contain the page.
        ValueError: the URL is invalid.
    """
    app = make_team_app(ApiServer(url, credentials), settings, StaticFiles(), Redactor(os.environ))
    listener = _open_socket(settings.host, settings.port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the gate reads these headers, only from trusted proxies
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
    """Return the URL of the API server from the variables of a pod, or None outside of a cluster."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def claims_of(words: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Parse claims in the form `NAMESPACE/CLAIM=FOLDER`.

    Raises:
        ValueError: a claim has another form; the message contains it.
    """
    found = {}
    for word in words:
        name, equals, folder = word.partition("=")
        namespace, slash, claim = name.partition("/")
        if not (namespace and slash and claim and equals and Path(folder).is_absolute()):
            raise ValueError(f"got {word}, expected NAMESPACE/CLAIM=FOLDER with an absolute folder")
        found[namespace, claim] = Path(folder)
    return found
