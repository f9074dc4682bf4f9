"""An MLflow server for tests, with modes in which it refuses, hangs, dies or is full."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """An MLflow server that stores its requests; `mode` selects a fault."""

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

    def __exit__(self, *what: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, document: dict[str, Any]) -> dict[str, Any] | None:
        """Return the API's answer, or None for an unknown object."""
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
        """Write nothing."""
