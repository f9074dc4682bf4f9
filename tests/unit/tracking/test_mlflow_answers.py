"""Detection of servers that are not MLflow, for any JSON response."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from rlrun.config.models.trackers import MlflowConfig
from rlrun.tracking.backends.mlflow_rest import MlflowTracker
from rlrun.tracking.tracker_records import TrackedRun, TrackerError

RUN = TrackedRun(uid="u", name="n", root=Path("/run"), config={}, max_steps=1)


@pytest.mark.parametrize(
    "answer",
    [{}, {"experiment": "1"}, {"experiment": {}, "runs": ["x"]}, {"experiment": {}, "run": {"info": 3}}],
    ids=str,
)
def test_unexpected_response_names_uri_field(answer: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MlflowTracker(MlflowConfig.model_validate({"uri": "http://tracker.example.org"}), {})
    monkeypatch.setattr(tracker, "_call_api", lambda *_: answer)
    with pytest.raises(
        TrackerError,
        match=re.escape("does not answer like an MLflow server; set tracking.mlflow.uri to the address of one"),
    ):
        tracker.open(RUN, [], 0)


class Redirecting(BaseHTTPRequestHandler):
    """Server that redirects every request."""

    target = ""
    status = 302

    def handle_one_request(self) -> None:
        """Handle any method."""
        self.close_connection = True
        self.raw_requestline = self.rfile.readline(65537)
        if self.parse_request():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer()

    def answer(self) -> None:
        self.send_response(self.status)
        self.send_header("Location", self.target)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Suppress log output."""


class Recording(Redirecting):
    """Server that records request headers."""

    seen: ClassVar[list[dict[str, str]]] = []

    def answer(self) -> None:
        self.seen.append(dict(self.headers))
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_credentials_follow_no_redirect(status: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Recording) as other,
        ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server,
    ):
        threads = [Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}) for one in (other, server)]
        for thread in threads:
            thread.start()
        try:
            monkeypatch.setattr(Redirecting, "target", f"http://127.0.0.1:{other.server_port}/x?token=hidden")
            monkeypatch.setattr(Redirecting, "status", status)
            monkeypatch.setattr(Recording, "seen", [])
            config = MlflowConfig.model_validate({"uri": f"http://127.0.0.1:{server.server_port}"})
            tracker = MlflowTracker(config, {"MLFLOW_TRACKING_TOKEN": "of-the-team"})
            with pytest.raises(TrackerError) as caught:
                tracker._send_request("mlflow/x", None if method == "GET" else b"{}", method)
            assert Recording.seen == []
            assert "hidden" not in str(caught.value)
        finally:
            for one in (other, server):
                one.shutdown()
            for thread in threads:
                thread.join()
