"""Checks before every request of a team's page: user, login and logout, probes, and the path prefix of an ingress.

The address of a request's sender comes from the connection, or from the headers of trusted proxies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from anyio import to_thread
from loguru import logger
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rlrun.inspect.kubectl import ClusterError
from rlrun.runtime.printable import escape_controls
from rlrun.ui.guard import PlainJSONResponse, cookie_of, with_policy
from rlrun.ui.team.callers import Caller, Callers, Sessions, SignedOutError, TooManyError
from rlrun.ui.team.cluster_api import request_error

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


LOGIN, LOGOUT = "/api/login", "/api/logout"
_BODY_MAX = 64 * 1024
_ENDED = "your session has ended; log in again"


@dataclass(frozen=True)
class Session:
    """Token of a request, and its source.

    Attributes:
        token: bearer token.
        cookie: cookie of the browser's session; None: the request itself contained the token.
    """

    token: str
    cookie: str | None


class Gate:
    """ASGI middleware of a team's page.

    Args:
        app: wrapped application; it reads `caller`, `current_caller` and `session` from `scope["state"]`.
        callers: users by their tokens.
        sessions: sessions of browsers.
        ready: function that returns why this server is not ready, or None.
        prefix: path of the page behind an ingress, such as `/rlrun`; requests may contain it or not.
        trusted: proxies whose `X-Forwarded-For` header is used.
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: Callers,
        sessions: Sessions,
        ready: Callable[[], str | None],
        prefix: str = "",
        trusted: Sequence[Network] = (),
    ) -> None:
        self._app, self._callers, self._sessions, self._ready = app, callers, sessions, ready
        self._prefix, self._trusted = prefix.rstrip("/"), tuple(trusted)
        self._asked = f"log in with a token of the cluster{callers.audience_hint}"
        # Browsers enforce the prefixes __Host- and __Secure-: the cookie comes from this host, and over TLS.
        self._cookie = "__Secure-rlrun" if self._prefix else "__Host-rlrun"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._prefix and path == self._prefix:
            await RedirectResponse(f"{self._prefix}/", status_code=308)(scope, receive, with_policy(send))
            return
        if self._prefix and path.startswith(f"{self._prefix}/"):
            path = path[len(self._prefix) :]
        scope = {**scope, "path": path, "raw_path": path.encode(), "state": {}}
        answer = await self._answer_request(scope, receive)
        await (answer or self._app)(scope, receive, with_policy(send))

    async def _answer_request(self, scope: Scope, receive: Receive) -> Response | None:
        """Return a response of the gate itself, or None if the application answers."""
        path, method, headers = scope["path"], scope["method"], Headers(scope=scope)
        if path == "/healthz":
            return PlainTextResponse("ok\n")
        if path == "/readyz":
            why = await to_thread.run_sync(self._ready)
            return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)
        if path in (LOGIN, LOGOUT):
            if method != "POST":
                return _login_problem(405, f"{method} is not allowed: a login is a POST request")
            return await self._answer_post(path, scope, receive)
        if method not in ("GET", "HEAD"):
            return _login_problem(405, f"the method {method} is not allowed: this page is read-only")
        if not (path == "/api" or path.startswith("/api/")):
            return None  # files of the page are public
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _login_problem(403, "requests from pages of other sites are not allowed")
        return await self._identify_caller(scope, headers)

    async def _identify_caller(self, scope: Scope, headers: Headers) -> Response | None:
        found = self._find_session(headers)
        if found is None:
            brought = cookie_of(headers.get("cookie", ""), self._cookie)
            return _login_problem(401, _ENDED if brought else self._asked, login=True)
        peer = peer_of(scope, self._trusted)

        def current_caller() -> Caller:
            if found.cookie is not None and self._sessions.find_token(found.cookie) != found.token:
                raise SignedOutError(_ENDED)
            return self._callers.identify_user(found.token, peer)

        try:
            caller = await to_thread.run_sync(current_caller)
        except (SignedOutError, TooManyError, ClusterError) as error:
            if isinstance(error, SignedOutError) and found.cookie is not None:
                self._sessions.close(found.cookie)
            return refuse_anonymous(error)
        scope["state"] |= {"caller": caller, "current_caller": current_caller, "session": found.cookie}
        return None

    def _find_session(self, headers: Headers) -> Session | None:
        """Return the token of a request; the Authorization header has priority over a cookie."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind:
            return Session(token.strip() if kind.lower() == "bearer" else "", None)
        cookie = cookie_of(headers.get("cookie", ""), self._cookie)
        kept = self._sessions.find_token(cookie) if cookie else None
        return None if kept is None else Session(kept, cookie)

    async def _answer_post(self, path: str, scope: Scope, receive: Receive) -> Response:
        headers = Headers(scope=scope)
        if (why := explain_foreign(headers)) is not None:
            return _login_problem(403, why)
        before = cookie_of(headers.get("cookie", ""), self._cookie)
        if path == LOGOUT:
            self._sessions.close(before)
            answer = Response(status_code=204)
            self._set_cookie(answer, "", 0)
            return answer
        token = await _login_token(Request(scope, receive))
        if isinstance(token, Response):
            return token
        peer = peer_of(scope, self._trusted)
        try:
            caller = await to_thread.run_sync(self._callers.identify_user, token, peer)
        except (SignedOutError, TooManyError, ClusterError) as error:
            logger.info(f"refused a login from {peer}: {type(error).__name__}")
            return refuse_anonymous(error)
        logger.info(f"{escape_controls(caller.name)} logged in from {peer}")
        if before:
            self._sessions.close(before)  # a session never changes its user
        answer = Response(status_code=204)
        self._set_cookie(answer, self._sessions.open(token), None)
        return answer

    def _set_cookie(self, answer: Response, value: str, age: int | None) -> None:
        path = f"{self._prefix}/"
        # Lax, not Strict: a link to the page in a chat would otherwise require a login. GET requests change nothing.
        answer.set_cookie(self._cookie, value, max_age=age, path=path, secure=True, httponly=True, samesite="lax")


def explain_foreign(headers: Headers) -> str | None:
    """Return why a POST request may come from another site, or None if it comes from this page."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return None if site == "same-origin" else "requests from pages of other sites are not allowed"
    origin = headers.get("origin")
    if origin is None:
        return "the header Origin is missing; programs must send their token with each request: Authorization: Bearer TOKEN"
    place = urlsplit(origin)
    return (
        None
        if place.netloc and place.netloc == headers.get("host")
        else "requests from pages of other sites are not allowed"
    )


async def _login_token(request: Request) -> str | Response:
    """Return the token of a login request, or an error response."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return _login_problem(415, 'the body of a login must be JSON: {"token": "..."}')
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > _BODY_MAX:
            return _login_problem(413, "a token has at most 16 KiB")
    try:
        token = json.loads(content)["token"]
    except (ValueError, LookupError, TypeError, RecursionError):
        token = None
    return (
        token.strip()
        if isinstance(token, str)
        else _login_problem(422, 'the body of a login must be JSON: {"token": "..."}')
    )


def refuse_anonymous(error: Exception) -> Response:
    """Return the response to a request without a valid user."""
    if isinstance(error, SignedOutError):
        return _login_problem(401, str(error), login=True)
    if isinstance(error, TooManyError):
        answer = _login_problem(429, str(error), login=True)
        answer.headers["Retry-After"] = str(max(1, round(error.seconds)))
        return answer
    return _login_problem(503, f"the data is temporarily unavailable: {request_error(error)}")


def _login_problem(status: int, text: str, *, login: bool = False) -> PlainJSONResponse:
    return PlainJSONResponse({"problem": text, "login": login}, status_code=status)
