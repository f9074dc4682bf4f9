"""A hub on this machine: the part of its protocol with which `huggingface_hub` resolves a revision and fetches files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/(.+?)/(revision|tree)/([^/]+)/?")
_FILE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)")
_STORE = re.compile(r"/store/([0-9a-f]{64})")
LARGE = (".safetensors", ".parquet")
"""Files that a repository keeps in a separate store, to which the hub redirects."""


@dataclass
class Repo:
    """Files of each commit, and the branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Required token; requests with another one get 401."""
    gated: bool = False
    """Whether requests with the token get 403 all the same."""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch."""
        sha = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


@dataclass
class Asked:
    """A request."""

    method: str
    path: str
    range: str | None
    token: str | None


class Hub(ThreadingHTTPServer):
    """The server; its repositories may change while it runs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repo] = {}
        """Repositories by `models/org/name` and `datasets/org/name`."""
        self.asked: list[Asked] = []
        self.broken_off: list[int] = []
        """For each of the next answers of the store: number of bytes after which the connection ends."""
        self.hold = threading.Event()
        """The store does not answer while this is clear."""
        self.hold.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def store(self) -> str:
        """Address of the store, another host than the hub's, so that the client treats its answers differently."""
        return f"http://localhost:{self.server_address[1]}"

    def content(self, sha256: str) -> bytes | None:
        files = (data for repo in self.repositories.values() for c in repo.commits.values() for data in c.values())
        return next((data for data in files if hashlib.sha256(data).hexdigest() == sha256), None)

    def fetched(self) -> list[str]:
        """Return names of the files whose content was requested, in order."""
        return [asked.path for asked in self.asked if asked.method == "GET" and "/api/" not in asked.path]


@contextmanager
def hub() -> Iterator[Hub]:
    """A running hub."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # the client's own request at the start of each process
            return self._refuse(404, "EntryNotFound")
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.server.asked.append(Asked(self.command, path, self.headers.get("Range"), bearer))
        if (match := _STORE.fullmatch(path)) is not None:
            return self._stored(match[1])
        if (match := _API.fullmatch(path)) is not None:
            kind, name, what, revision = match.groups()
        elif (match := _FILE.fullmatch(path)) is not None:
            kind, name, what, revision = "datasets" if match[1] else "models", match[2], match[4], match[3]
        else:
            return self._refuse(404, "EntryNotFound")
        repo = self.server.repositories.get(f"{kind}/{name}")
        if repo is None or (repo.token is not None and repo.token != bearer):
            return self._refuse(404 if repo is None and bearer else 401, "RepoNotFound")
        if repo.gated:
            return self._refuse(403, "GatedRepo")
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repo.commits[sha]
        if what == "revision":
            return self._json({"id": name, "sha": sha, "siblings": [{"rfilename": file} for file in files]})
        if what == "tree":
            return self._json([_entry(file, data) for file, data in files.items()])
        if what not in files:
            return self._refuse(404, "EntryNotFound")
        return self._file(what, files[what], sha)

    def _file(self, name: str, data: bytes, commit: str) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if name.endswith(LARGE):
            linked = {
                "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{self.server.store}/store/{sha256}",
            }
            return self._send(302, headers | linked, b"")
        return self._send(200, headers, data)

    def _stored(self, sha256: str) -> None:
        self.server.hold.wait(240)
        data = self.server.content(sha256)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        headers, status = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"}, 200
        if (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) is not None:
            headers["Content-Range"] = f"bytes {match[1]}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[int(match[1]) :]
        cut = self.server.broken_off.pop(0) if self.server.broken_off and self.command == "GET" else None
        self._send(status, headers, data, cut)
        return None

    def _json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
