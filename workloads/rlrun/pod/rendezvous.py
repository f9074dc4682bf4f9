"""Rendezvous of the trainer's pods before torchrun starts, and the state of each pod for its probe.

Pods of a group are scheduled, pull images and mount volumes at different times; torchrun's own rendezvous would time out, which costs a
restart. Therefore the first pod waits until all other pods have reported, and they report to it until it starts the group. A pod of another
attempt is refused.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.endpoints import POD_JOIN, POD_METRICS, POD_PORT, POD_READY, TRAINER_READY, holds_key
from rlrun.runtime import exit_codes

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_SECONDS = 5.0
MAX_CONNECTIONS = 256
PROBE_SECONDS = 1.0
"""Timeout within a probe: kubelets time out after one second by default, so a later answer is useless."""


class _Answers(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS

    def _send_json(self, status: HTTPStatus, **body: object) -> None:
        self._send_response(status, "application/json", json.dumps(body).encode())

    def _send_response(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        return


class PodServer:
    """HTTP server of a trainer pod.

    Args:
        host: address to bind.
        attempt: number of the attempt.
        api_key: key of the run, which joining pods must send.
        look: function that returns why the pod is not ready, or None.
        metrics: function that returns the pod's metrics as Prometheus text.

    Raises:
        RoleError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        *,
        attempt: int,
        api_key: str,
        look: Callable[[], str | None],
        metrics: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self.joined: set[int] = set()
        """Ordinals of the pods that have reported."""
        self.go = threading.Event()
        """Set when the group starts."""
        outer = self

        class Handler(_Answers):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if url.path == POD_READY:
                    reason = look()
                    self._send_json(
                        HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, ready=reason is None, reason=reason
                    )
                elif url.path == POD_METRICS:
                    self._send_response(HTTPStatus.OK, METRICS_TYPE, metrics())
                elif url.path == POD_JOIN:
                    self._add_pod(parse_qs(url.query))
                else:
                    self._send_json(HTTPStatus.NOT_FOUND, reason="unknown route")

            def _add_pod(self, query: dict[str, list[str]]) -> None:
                if not holds_key(self.headers.get_all("Authorization", ()), api_key):
                    self._send_json(HTTPStatus.UNAUTHORIZED, reason="wrong or missing API key")
                elif query.get("attempt") != [str(attempt)]:
                    self._send_json(HTTPStatus.CONFLICT, reason=f"this is attempt {attempt}")
                elif not (ordinal := query.get("ordinal", [""])[0]).isdecimal():
                    self._send_json(HTTPStatus.BAD_REQUEST, reason="ordinal must be the pod's number")
                else:
                    outer.joined.add(int(ordinal))
                    self._send_json(HTTPStatus.OK, go=outer.go.is_set(), reason=look())

        try:
            self._server = _Server((host, POD_PORT), Handler)
        except OSError as error:
            message = f"cannot listen on {host}:{POD_PORT}: {error.strerror}"
            raise RoleError(message, exit_codes.UNAVAILABLE) from error
        threading.Thread(target=self._server.serve_forever, name="pod", daemon=True).start()

    def missing_pods(self, nodes: int) -> str | None:
        """Return a message about other pods that have not reported, or None if all have."""
        left = sorted(set(range(1, nodes)) - self.joined)
        return f"not up: {', '.join(f'-{ordinal}' for ordinal in left)}" if left else None

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


_Request = socket.socket | tuple[bytes, socket.socket]
"""A connection, in the form of `socketserver`; the tuple is a datagram's."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: dict[_Request, None] = {}
        """Open connections, each with a thread, oldest first."""
        super().__init__(address, handler)

    def process_request(self, request: _Request, client_address: object) -> None:
        """Answer in a thread. If there are too many connections, close the oldest, because a legitimate one takes milliseconds."""
        if len(self._open) >= MAX_CONNECTIONS:
            with suppress(OSError, StopIteration, RuntimeError, KeyError):  # it has just been answered
                oldest = next(iter(self._open))
                del self._open[oldest]
                if isinstance(oldest, socket.socket):
                    oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Request) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Ignore clients that disconnect or do not send HTTP."""


def report_to_first(master: str, *, ordinal: int, attempt: int, api_key: str) -> str | None:
    """Report to the first pod.

    Returns:
        Reason why the group does not start yet, or None if it starts.

    Raises:
        RoleError: the first pod refuses the key.
    """
    host = f"[{master}]" if ":" in master else master
    url = f"http://{host}:{POD_PORT}{POD_JOIN}?ordinal={ordinal}&attempt={attempt}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"})
    try:
        with _open_without_proxy(request, REQUEST_SECONDS) as response:
            answer = json.load(response)
        return None if answer["go"] else str(answer["reason"])
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise RoleError(
                f"{master} refuses the key: RLRUN_API_KEY must be the same in all pods", exit_codes.CONFIGURATION
            ) from None
        return f"{master} answered {error.code}: {error.read(200).decode(errors='replace')}"
    except (OSError, ValueError, KeyError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{master}: {getattr(reason, 'strerror', None) or reason}"


def channel_problem(port: int) -> str | None:
    """Return why rank 0 of this pod does not accept batches yet, or None if it does."""
    try:
        with _open_without_proxy(urllib.request.Request(f"http://127.0.0.1:{port}{TRAINER_READY}"), PROBE_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        try:
            return str(json.load(error)["reason"])
        except (OSError, ValueError, KeyError):
            return f"the channel answers {error.code}"
    except OSError:
        return "the channel of rank 0 does not answer"


def _open_without_proxy(request: urllib.request.Request, timeout: float) -> HTTPResponse:
    """Open a URL without a proxy: cluster addresses are never behind one."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    response: HTTPResponse = opener.open(request, timeout=timeout)
    return response
