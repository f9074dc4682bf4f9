"""A tracker that hangs, dies, refuses or is full loses nothing: an MLflow server of the tests' own, which does all of it in turn."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlrun.tracking.starter import SinkProcess
from tests.processes.tracking.conftest import SinkOf, until
from tests.support.tracked_run import UID

MODES = ("refuses", "hangs", "dies", "full")


class Server(ThreadingHTTPServer):
    """An MLflow server that keeps what it is sent; `mode` says how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode = ""
        self.failed: dict[str, int] = {}
        self.runs: list[dict[str, Any]] = []
        self.parameters: dict[str, str] = {}
        self.points: set[tuple[int, float]] = set()
        self.status = ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, document: dict[str, Any]) -> dict[str, Any] | None:
        """The interface's answers; None: there is no such thing."""
        what = path.partition("?")[0].removeprefix("/api/2.0/mlflow/")
        if what == "experiments/get-by-name":
            return {"experiment": {"experiment_id": "1"}} if self.runs else None
        if what == "experiments/create":
            return {"experiment_id": "1"}
        if what == "runs/search":
            return {"runs": [run for run in self.runs if f"'{run['uid']}'" in document["filter"]]}
        if what == "runs/create":
            info = {"run_id": "r", "artifact_uri": "mlflow-artifacts:/1/r/artifacts"}
            self.runs.append({"uid": document["tags"][0]["value"], "info": info})
            return {"run": {"info": info}}
        if what == "runs/log-batch":
            assert len(document.get("metrics", ())) <= 1000
            assert len(document.get("params", ())) <= 100
            self.parameters |= {item["key"]: item["value"] for item in document.get("params", ())}
            self.points |= {(m["step"], m["value"]) for m in document.get("metrics", ()) if m["key"] == "loss/mean"}
        if what == "runs/update":
            self.status = document["status"]
        return {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.do_POST()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        mode = self.server.mode
        if mode:
            self.server.failed[mode] = self.server.failed.get(mode, 0) + 1
        if mode == "hangs":
            time.sleep(60)
        elif mode == "dies":
            self.connection.close()
        elif mode:
            self._send(403 if mode == "refuses" else 507, b"no")
        else:
            is_file = self.path.startswith("/api/2.0/mlflow-artifacts/")
            found = self.server.answer(self.path, {} if is_file or not content else json.loads(content))
            self._send(404 if found is None else 200, json.dumps(found or {}).encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


def test_whatever_a_tracker_does_its_curve_is_whole_in_the_end(server: Server, sink_of: Callable[..., SinkOf]) -> None:
    """All of it in one run, in mid-course; then the tracker is well again."""
    sink = sink_of({"mlflow": {"uri": server.url}})
    run = sink.run
    server.mode = MODES[0]
    sink.start("--patience", "5")
    step = 0
    for mode in MODES:
        server.mode = mode
        for _ in range(5):
            step += 1
            run.step(step)
        until(lambda mode=mode: server.failed.get(mode, 0) > 0)  # type: ignore[misc]
        server.mode = ""
        until(lambda step=step: len(server.points) >= step)  # type: ignore[misc]
    for step in range(21, 41):
        run.step(step)
    log = sink.finish()
    assert sorted(server.points) == run.expected()
    assert [r["uid"] for r in server.runs] == [UID]  # one run, however often it was begun
    assert server.status == "FINISHED"
    assert server.parameters["trainer.max_steps"] == "40"
    for said in (
        "refuses: 403 no; set MLFLOW_TRACKING_USERNAME",
        "does not get on for 5 s",
        "507",
    ):
        assert said in log, log


def test_at_the_end_of_a_run_nobody_waits_for_a_tracker_that_is_down(
    server: Server, sink_of: Callable[..., SinkOf]
) -> None:
    sink = sink_of({"mlflow": {"uri": server.url}})
    server.mode = "refuses"
    process = sink.start()
    sink.run.step(1)
    until(lambda: bool(server.failed))
    began = time.monotonic()
    sink.finish()
    assert process.returncode != 0
    assert time.monotonic() - began < 20
    server.mode = ""
    assert sink.start("--once").wait(timeout=60) == 0
    assert sorted(server.points) == sink.run.expected()


def test_a_sink_that_is_killed_is_started_again(
    server: Server, sink_of: Callable[..., SinkOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orphaned worker gives way to the new one."""
    monkeypatch.setattr("rlrun.tracking.starter._PAUSE_SECONDS", 0.1)
    run = sink_of({"mlflow": {"uri": server.url}}).run
    root: Path = run.paths.root
    process = SinkProcess(run.paths.run_json, root, os.environ)
    try:
        run.step(1)
        process.keep()
        until(lambda: len(server.points) == 1)
        assert process._process is not None
        first = process._process
        first.kill()
        first.wait()
        run.step(2)
        until(lambda: process.keep() is None and len(server.points) == 2)
        assert process._process is not first
        run.step(3)
    finally:
        assert process.stop()
    assert sorted(server.points) == run.expected()
