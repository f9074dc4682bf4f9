"""Every route of the running server, requested without a key, with a wrong key and with the right key."""

from __future__ import annotations

import http.client
import re
import socket
import urllib.parse

import pytest

from rlrun.inference.guard import KEYED, PUBLIC
from tests.support.waiting import PATIENCE_SECONDS

from .conftest import API_KEY, Server

REFUSED = {
    "/generative_scoring",
    "/inference/v1/abort_requests",
    "/invocations",
    "/is_scaling_elastic_ep",
    "/kv_event_sources",
    "/scale_elastic_ep",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/systemone",
}
"""Routes of vLLM that the guard closes. A vLLM with a new route fails here until the route is classified."""
DEVELOPMENT = [
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/is_paused",
    "/is_sleeping",
    "/pause",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
]
TRICKS = [
    "//rlrun/status",
    "/rlrun//status",
    "/rlrun/status/",
    "/RLRUN/status",
    "/rlrun/./status",
    "/health/../rlrun/status",
    "/health/%2e%2e/rlrun/status",
    "/health;/rlrun/status",
    "/health%2f..%2frlrun%2fstatus",
    "/metrics/../v1/models",
    "http://127.0.0.1/rlrun/status",
]


def ask(server: Server, method: str, path: str, key: str | None = None) -> int:
    """Return the status of one request whose path is sent unchanged."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=PATIENCE_SECONDS)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.fixture(scope="module")
def routes(server: Server) -> list[tuple[str, str]]:
    """Return method and path of every route, as the server lists them at the start."""
    found = re.findall(r"Route: (\S+), Methods: (.+)", server.log.read_text())
    pairs = [(method, path) for path, methods in found for method in methods.strip().split(", ")]
    assert len(pairs) > 25
    assert ("POST", "/rlrun/update_weights") in pairs
    return pairs


def test_every_route_is_classified(routes: list[tuple[str, str]]) -> None:
    assert {path for _, path in routes} - set(PUBLIC) - set(KEYED) == REFUSED


def test_no_route_answers_without_the_key(server: Server, routes: list[tuple[str, str]]) -> None:
    for method, path in routes:
        concrete = path.replace("{response_id}", "x")
        for key in (None, "wrong", API_KEY + "x", API_KEY[:-1]):
            status = ask(server, method, concrete, key)
            if path in PUBLIC:
                assert status in (200, 503), (method, path)
            else:
                assert status in (401, 403), (method, path, key)


def test_engine_changing_routes_are_closed_with_the_key(server: Server, routes: list[tuple[str, str]]) -> None:
    assert not {path for _, path in routes} & set(DEVELOPMENT), "development mode is off"
    for path in [*DEVELOPMENT, *(path.replace("{response_id}", "x") for path in REFUSED)]:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert ask(server, method, path, API_KEY) == 403, (method, path)


def test_key_opens_the_client_routes(server: Server) -> None:
    for path in ("/v1/models", "/rlrun/status", "/version", "/load", "/ping"):
        assert ask(server, "GET", path, API_KEY) == 200, path
        assert ask(server, "GET", path) == 401, path


def test_path_tricks_do_not_bypass_the_guard(server: Server) -> None:
    for trick in TRICKS:
        assert ask(server, "GET", trick) in (400, 401, 403), trick
    for method in ("OPTIONS", "HEAD", "PUT", "TRACE", "get"):
        assert ask(server, method, "/rlrun/status") in (400, 401, 403, 405), method
        assert ask(server, method, "/rlrun/update_weights") in (400, 401, 403, 405), method


def test_websockets_are_refused(server: Server) -> None:
    address = urllib.parse.urlsplit(server.url)
    for path in ("/v1/realtime", "/health", "/rlrun/status"):
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(
                f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                f"Authorization: Bearer {API_KEY}\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            )
            assert connection.recv(64).startswith(b"HTTP/1.1 403"), path
