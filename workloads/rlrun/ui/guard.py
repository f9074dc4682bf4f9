"""Checks before every request, headers of every response, and removal of secrets from responses.

The checks cover host names, token and methods; the headers limit what a page can load. Secrets are removed with `rlrun.runtime.redact`:
all filters for data of runs, only the removal of certain secrets for model output.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlrun.runtime import redact
from rlrun.runtime.printable import escape_controls

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_METHODS = ("GET", "HEAD")
_WITHOUT_TOKEN = "this page needs a token; open the URL that `rlrun ui` printed: http://HOST:PORT/?token=…"


class PlainJSONResponse(JSONResponse):
    """JSON response without control characters that a browser would interpret, see `escape_controls`."""

    def render(self, content: object) -> bytes:
        """Return the encoded document."""
        return super().render(_plain_answer(content))


def _plain_answer(value: object) -> object:
    if isinstance(value, str):
        return escape_controls(value, lines=True)
    if isinstance(value, Mapping):
        return {name: _plain_answer(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_answer(one) for one in value]
    return value


def with_policy(send: Send) -> Send:
    """Return a `send` that adds the security headers to every response."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return with_headers


class Guard:
    """ASGI middleware with the checks of `rlrun ui`.

    Args:
        app: wrapped application.
        names: allowed host names, as a protection from pages of other sites whose name resolves to this address (DNS rebinding). None: any
            name; the token is then the protection.
        token: required token, first in the URL and then in a cookie. None: no token.
        port: port of the server, part of the cookie's name because all ports of a host share cookies.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str] | None, token: str | None, port: int) -> None:
        if names is None and token is None:
            raise ValueError("token is required if names is None")
        self._app, self._token = app, token
        self._names = None if names is None else frozenset(names)
        self._cookie = f"rlrun_ui_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refuse_request(scope)
        await (refusal or self._app)(scope, receive, with_policy(send))

    def _refuse_request(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._names is not None and _host_name(host) not in self._names:
            return _request_problem(
                421, f"the host name {host!r} is not allowed; open http://localhost with the server's port"
            )
        if scope["method"] not in _METHODS:
            return _request_problem(405, f"the method {scope['method']} is not allowed: this page is read-only")
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "same-origin") not in (
            "same-origin",
            "none",
        ):
            return _request_problem(403, "requests from pages of other sites are not allowed")
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        brought = next((value for name, value in query if name == "token"), None)
        if brought is not None and self._is_token(brought):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # Remove the token from the URL, so that it appears neither in the history nor in screenshots.
            answer = RedirectResponse(f"{_is_local_path(scope['path'])}{'?' + rest if rest else ''}", status_code=303)
            # Lax: with Strict, a link from another site (a chat) would arrive without the cookie after this redirect.
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
            return answer
        if self._is_token(cookie_of(headers.get("cookie", ""), self._cookie)):
            return None
        if scope["path"].startswith("/api/"):
            return _request_problem(401, _WITHOUT_TOKEN)
        return PlainTextResponse(_WITHOUT_TOKEN + "\n", status_code=401)

    def _is_token(self, text: str) -> bool:
        return self._token is not None and hmac.compare_digest(text.encode(), self._token.encode())


def _host_name(host: str) -> str:
    """Return the host name of a Host header without the port, because a tunnel can change the port."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _is_local_path(path: str) -> str:
    """Return a path that no browser interprets as the URL of another host (`//host`)."""
    return "/" + path.lstrip("/\\")


def cookie_of(header: str, name: str) -> str:
    """Return the value of a cookie, or an empty text."""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _request_problem(status: int, text: str) -> Response:
    return PlainJSONResponse({"problem": text}, status_code=status)


Model = TypeVar("Model", bound=BaseModel)


class Redactor:
    """Remover of secrets from responses.

    Args:
        environment: environment of this process; values of its secret variables are treated as known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = redact.known_secrets(environment)

    def redact_model(self, answer: Model) -> Model:
        """Return a response about a run without secrets."""
        return type(answer).model_validate(redact.redact_document(answer.model_dump(), self._known))

    def redact_document(self, value: dict[str, object]) -> dict[str, object]:
        """Return a configuration without secrets; free-form values that are not known to be harmless are hidden."""
        found = redact.redact_configuration(value, self._known)
        assert isinstance(found, dict)
        return found

    def redact_text(self, content: str) -> str:
        """Return a text of a model or an environment without certain secrets and without direction controls."""
        return escape_controls(redact.redact_certain(content, self._known), lines=True)

    def secret_spans(self, content: str) -> list[tuple[int, int]]:
        """Return the spans of a text that are certainly secrets."""
        return redact.certain_spans(content, self._known)
