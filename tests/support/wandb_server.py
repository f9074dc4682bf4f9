"""A W&B server for tests, with the part of its API that the library needs for a run's history."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PROJECT = {"id": "p", "name": "rlrun", "entity": {"id": "e", "name": "me"}}


class WandbServer(ThreadingHTTPServer):
    """Stores the rows of one run; while it is `down` it closes every connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.down = False
        self.rows: list[dict[str, Any]] = []
        self.run = ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *what: object) -> None:
        self.shutdown()
        super().__exit__(*what)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def query(self, text: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return data of one GraphQL query."""
        if "RunResumeStatus" in text:
            return {"model": {**_PROJECT, "bucket": self._bucket()} if self.run else None}
        if "UpsertBucket" in text:
            self.run = variables["name"]
            return {"upsertBucket": {"bucket": self._bucket(), "inserted": not self.rows}}
        if "CreateRunFiles" in text:
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self) -> dict[str, Any]:
        return {
            "id": "b", "name": self.run, "displayName": "n", "config": "{}", "tags": [], "project": _PROJECT, "wandbConfig": '{"t": 1}',
            "summaryMetrics": json.dumps(self.rows[-1] if self.rows else {}), "historyLineCount": len(self.rows),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]), "eventsTail": "[]", "eventsLineCount": 0,
            "logLineCount": 0,
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    server: WandbServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.do_POST()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.down:
            self.close_connection = True
            return
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            document = json.loads(content)
            answer = {"data": self.server.query(document["query"], document.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            history = (json.loads(content).get("files") or {}).get("wandb-history.jsonl")
            if history:
                self.server.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
            answer = {"exitcode": None, "limits": {}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""
