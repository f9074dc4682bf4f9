"""Requests to the API server with the account of this pod."""

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
from rlrun.runtime.printable import printable

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of `token` and `ca.crt`."""
_SECONDS = 5.0
"""Longest silence of the API server."""
_BYTES_MAX = 256 << 20


_REFUSED = "the page's account lacks a right in the cluster; the log of the page's pod says which one"


class UnansweredError(ClusterError):
    """The API server does not answer, or not with an answer.

    Args:
        message: for the log.
        told: for users of the page; None: the message itself, which has no words of the cluster then.
    """

    def __init__(self, message: str, told: str | None = None) -> None:
        super().__init__(message)
        self.told = told or message


class RefusedError(ClusterError):
    """The API server refuses a request of this pod's account.

    Args:
        status: of HTTP.
        message: its own words, which name namespaces and the account: for the log.
        told: for users of the page, whatever they may see.
    """

    def __init__(self, status: int, message: str, told: str = _REFUSED) -> None:
        super().__init__(message)
        self.status, self.told = status, told


def request_error(error: Exception) -> str:
    """Words of an error of the cluster for users; all of it goes into the log, since it may name what they may not see."""
    words = error.told if isinstance(error, RefusedError | UnansweredError) else "the cluster does not answer"
    if words != str(error):
        logger.warning(printable(str(error)))
    return words


class Api(Protocol):
    """The API server. Tests give a made one."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """An object or a list; `ClusterError` if there is none."""

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """The answer to a review; `ClusterError` if there is none."""


class ApiServer:
    """The API server, over one connection for each thread.

    Args:
        url: `https://`; plain `http://` on loopback alone, for tests.
        credentials: folder of `token` and `ca.crt`; both rotate while the page is served.

    Raises:
        ValueError: the URL is no such one.
    """

    def __init__(self, url: str, credentials: Path = CREDENTIALS) -> None:
        place = urlsplit(url)
        loopback = place.hostname in ("127.0.0.1", "::1", "localhost")
        if place.hostname is None or not (place.scheme == "https" or (place.scheme == "http" and loopback)):
            raise ValueError(f"{url} is no address of an API server; it looks like https://10.96.0.1:443")
        self._host, self._port, self._tls = place.hostname, place.port, place.scheme == "https"
        self._credentials = credentials
        self._kept = threading.local()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """See `Api`."""
        return self._ask("GET", f"{path}?{urlencode(query)}" if query else path, None)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """See `Api`."""
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Json:
        try:
            status, content = self._exchange(method, path, body)
            document = json.loads(content)
        except (OSError, http.client.HTTPException) as error:
            self._forget()
            raise UnansweredError(f"the API server does not answer: {printable(str(error)) or 'silence'}") from None
        except ValueError:
            raise UnansweredError("the API server answers no JSON") from None
        if not isinstance(document, dict):
            raise UnansweredError("the API server answers no object")
        if status >= 500 or status == 429:
            raise UnansweredError(
                f"the API server answers {status}: {_status_message(document)}", f"the API server answers {status}"
            )
        if status >= 400:
            raise RefusedError(status, f"the API server refuses: {_status_message(document)}")
        return document

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = (self._credentials / "token").read_text().strip()
        headers["Authorization"] = f"Bearer {token}"
        connection, fresh = self._connection()
        try:
            return _read_answer(connection, method, path, body, headers)
        except (ConnectionError, http.client.HTTPException, ssl.SSLError):
            if fresh:
                raise
        self._forget()  # the server has closed it since the last request
        return _read_answer(self._connection()[0], method, path, body, headers)

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Connection of the calling thread, and True if it is a new one."""
        authority = (self._credentials / "ca.crt").read_bytes() if self._tls else b""
        kept: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        if kept is not None and authority == self._kept.authority:
            return kept, False
        self._forget()
        if self._tls:
            trusted = ssl.create_default_context(cadata=authority.decode("ascii"))
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=_SECONDS, context=trusted
            )
        else:
            made = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        self._kept.connection, self._kept.authority = made, authority
        return made, True

    def _forget(self) -> None:
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
        raise http.client.HTTPException("an answer of more than 256 MiB")
    return reply.status, content


def _status_message(document: Json) -> str:
    return printable(str(document.get("message") or "without a word"))[:500]
