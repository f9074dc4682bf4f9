"""Client of the API server with this pod's service account."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode, urlsplit

from loguru import logger

from rlrun.inspect.kubectl import ClusterError
from rlrun.runtime.json_types import Json
from rlrun.runtime.printable import escape_controls

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with `token` and `ca.crt`."""
_SECONDS = 5.0
"""Timeout of the connection in seconds."""
_BYTES_MAX = 256 << 20


_REFUSED = "the service account of this page lacks a right in the cluster; the log of the page's pod names the right"


class UnansweredError(ClusterError):
    """Error if the API server does not respond, or responds with an invalid body.

    Args:
        message: message for the log.
        told: message for users of the page. None: the same message, which then contains no text of the cluster.
    """

    def __init__(self, message: str, told: str | None = None) -> None:
        super().__init__(message)
        self.told = told or message


class RefusedError(ClusterError):
    """Error if the API server refuses a request of this pod's account.

    Args:
        status: HTTP status.
        message: message for the log; it can contain namespaces and the account.
        told: message for users of the page.
    """

    def __init__(self, status: int, message: str, told: str = _REFUSED) -> None:
        super().__init__(message)
        self.status, self.told = status, told


def request_error(error: Exception) -> str:
    """Return the message of a cluster error for users; the full error is logged, because users may not be allowed to see it."""
    words = error.told if isinstance(error, RefusedError | UnansweredError) else "the cluster does not respond"
    if words != str(error):
        logger.warning(escape_controls(str(error)))
    return words


class Api(Protocol):
    """API server; tests use a fake implementation."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """Return an object or a list; raises `ClusterError`."""

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """Return the result of a review; raises `ClusterError`."""


class ApiServer:
    """Client of the API server with one connection per thread.

    Args:
        url: `https://` URL; `http://` is allowed only on loopback, for tests.
        credentials: folder with `token` and `ca.crt`; both can rotate at any time.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(self, url: str, credentials: Path = CREDENTIALS) -> None:
        place = urlsplit(url)
        loopback = place.hostname in ("127.0.0.1", "::1", "localhost")
        if place.hostname is None or not (place.scheme == "https" or (place.scheme == "http" and loopback)):
            raise ValueError(f"{url} is not a URL of an API server; use a URL such as https://10.96.0.1:443")
        self._host, self._port, self._tls = place.hostname, place.port, place.scheme == "https"
        self._credentials = credentials
        self._kept = threading.local()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """See `Api`."""
        return self._send_request("GET", f"{path}?{urlencode(query)}" if query else path, None)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """See `Api`."""
        return self._send_request("POST", path, json.dumps(body).encode())

    def _send_request(self, method: str, path: str, body: bytes | None) -> Json:
        try:
            status, content = self._exchange_message(method, path, body)
            document = json.loads(content)
        except (OSError, http.client.HTTPException) as error:
            self._drop_connection()
            raise UnansweredError(
                f"the API server does not respond: {escape_controls(str(error)) or 'timeout'}"
            ) from None
        except ValueError:
            raise UnansweredError("the response of the API server is not JSON") from None
        if not isinstance(document, dict):
            raise UnansweredError("the response of the API server is not an object")
        if status >= 500 or status == 429:
            raise UnansweredError(
                f"the API server returned {status}: {_status_message(document)}", f"the API server returned {status}"
            )
        if status >= 400:
            raise RefusedError(status, f"the API server refused the request: {_status_message(document)}")
        return document

    def _exchange_message(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = (self._credentials / "token").read_text().strip()
        headers["Authorization"] = f"Bearer {token}"
        connection, fresh = self._thread_connection()
        try:
            return _read_answer(connection, method, path, body, headers)
        except (ConnectionError, http.client.HTTPException, ssl.SSLError):
            if fresh:
                raise
        self._drop_connection()  # the server has closed the idle connection
        return _read_answer(self._thread_connection()[0], method, path, body, headers)

    def _thread_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return the connection of the calling thread, and whether it is new."""
        authority = (self._credentials / "ca.crt").read_bytes() if self._tls else b""
        kept: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        if kept is not None and authority == self._kept.authority:
            return kept, False
        self._drop_connection()
        if self._tls:
            trusted = ssl.create_default_context(cadata=authority.decode("ascii"))
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=_SECONDS, context=trusted
            )
        else:
            made = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        self._kept.connection, self._kept.authority = made, authority
        return made, True

    def _drop_connection(self) -> None:
        kept: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        self._kept.connection = None
        if kept is not None:
            kept.close()


def _read_answer(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    connection.request(method, path, body, dict(headers))
    reply = connection.getresponse()
    content = reply.read(_BYTES_MAX + 1)
    if len(content) > _BYTES_MAX:
        raise http.client.HTTPException("a response of more than 256 MiB")
    return reply.status, content


def _status_message(document: Json) -> str:
    return escape_controls(str(document.get("message") or "no message"))[:500]
