"""`rlrun ui` as a program: output, HTTP responses and refused arguments."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rlrun.ui.page_server import Address, guard_app
from tests.browser.served import served
from tests.support.made_runs import Client, made
from tests.support.programs import run_program, wait_for_exit
from tests.support.waiting import PATIENCE_SECONDS


def run_ui(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlrun.cli.main", "ui", *words]
    return run_program(command)


def send_request(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_SECONDS)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


def test_page_and_api_are_served_until_signal(tmp_path: Path) -> None:
    run = made(tmp_path / "runs" / "demo")
    with served(run.root.parent) as server:
        assert server.url.startswith("http://127.0.0.1:")
        status, page = send_request(server.url, "/")
        assert (status, b'<div id="page">' in page) == (200, True)
        status, found = send_request(server.url, "/api/runs")
        assert [one["name"] for one in json.loads(found)["runs"]] == ["demo"]
        assert send_request(server.url, "/api/runs", Host="evil.example")[0] == 421
        for path in ("/..%2f..%2fpyproject.toml", "/assets/../../app.py", "/%2e%2e/app.py"):
            assert send_request(server.url, path)[0] == 404
        events = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=PATIENCE_SECONDS)
        events.request("GET", "/api/events")
        assert events.getresponse().readline() == b"event: runs\n"
        server.process.send_signal(signal.SIGTERM)
        assert wait_for_exit(server.process) in (0, -signal.SIGTERM), "a stream of events does not hold it up"
        events.close()


def test_public_address_requires_a_token(tmp_path: Path) -> None:
    run = made(tmp_path / "runs" / "demo")
    with served(run.root.parent, "--host", "0.0.0.0") as server:
        port = urlsplit(server.url).port
        here = f"http://127.0.0.1:{port}"
        assert "?token=" in server.url
        assert send_request(here, "/api/runs")[0] == 401
        assert send_request(here, f"/?{urlsplit(server.url).query}")[0] == 303
        token = server.url.partition("=")[2]
        assert send_request(here, "/api/runs", Cookie=f"rlrun_ui_{port}={token}")[0] == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.9.9.9", True),
        ("0.0.0.0", False),
        ("::", False),
        ("gpu-7", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, loopback: bool) -> None:
    address = Address(host, 1, token=False)
    assert address.is_loopback is loopback
    if not loopback:
        assert Client(guard_app(None, address, 1, "t")).get("/api/runs").status == 401  # type: ignore[arg-type]


def test_missing_folder_and_used_port_are_one_line(tmp_path: Path) -> None:
    done = run_ui(str(tmp_path / "none"))
    assert done.returncode == 64, done.stderr
    assert (
        done.stderr
        == f"rlrun ui: FOLDER: there is no folder {tmp_path}/none; set the folder of a run, or a folder with runs\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_ui(str(tmp_path), "--port", str(port))
    assert done.returncode == 69, done.stderr
    assert (
        done.stderr
        == f"rlrun ui: cannot listen on 127.0.0.1:{port}: Address already in use; set another --port or --host\n"
    )
