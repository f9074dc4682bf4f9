"""A client of the API server in the standard library, with the requests for starting a cluster and watching a
collection.

kubectl takes a third of a second of CPU per call, and the start of a cluster needs dozens of requests.
"""

import base64
import http.client
import json
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.errors import ClusterError

REQUEST_TIMEOUT_S = 5.0
WATCH_SECONDS = 240  # the server ends a watch after that time; the watcher then lists again
Json = dict[str, Any]


class ApiError(Exception):
    """The server refused a request or does not answer."""


class ApiClient:
    """Client of the server of one of our kubeconfigs. It is safe to use from several threads: each request has its own
    connection."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._address = urlsplit(cluster["server"]).netloc
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._context = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as pair:  # ssl reads a key only from a file
            pair.write(base64.b64decode(user["client-certificate-data"]))
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            self._context.load_cert_chain(pair.name)

    def request(self, method: str, path: str, body: Json | None = None, *, timeout: float = REQUEST_TIMEOUT_S) -> bytes:
        """Send one request.

        Returns:
            The body of the answer.

        Raises:
            ApiError: no answer, or a status above 299.
        """
        connection = self._connect(timeout)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{method} {path}: {error}") from None
        finally:
            connection.close()
        if answer.status > 299:
            raise ApiError(f"{method} {path}: {answer.status} {content.decode(errors='replace')[:500]}")
        return content

    def get(self, path: str) -> Json:
        """Return an object or a list.

        Raises:
            ApiError: as for `request`.
        """
        result: Json = json.loads(self.request("GET", path))
        return result

    def ready(self) -> bool:
        """Return whether the server reports that it is ready."""
        try:
            return self.request("GET", "/readyz", timeout=5.0) == b"ok"
        except ApiError:
            return False

    def create(self, path: str, item: Json) -> None:
        """Create an object.

        Raises:
            ClusterError: the server refuses it.
        """
        try:
            self.request("POST", path, item)
        except ApiError as error:
            raise ClusterError(f"cannot create {item['kind']} {item['metadata']['name']}: {error}") from None

    def watch(self, path: str, version: str) -> Iterator[Json]:
        """Yield events of a collection after a resource version, until the server or the connection ends them.

        Raises:
            ApiError: the watch could not start.
        """
        connection = self._connect(WATCH_SECONDS + 60)
        try:
            query = f"?watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}"
            connection.request("GET", path + query)
            answer = connection.getresponse()
            if answer.status > 299:
                raise ApiError(f"watch {path}: {answer.status}")
            while line := answer.readline():
                yield json.loads(line)
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"watch {path}: {error}") from None
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._address, context=self._context, timeout=timeout)
