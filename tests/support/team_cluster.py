"""A cluster of two teams, as the API server would answer the page: in this process, or over HTTP on loopback."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import FastAPI
from fastapi.routing import APIRoute

from rlrun.ui.team.callers import ACCESS_REVIEWS, TOKEN_REVIEWS
from rlrun.ui.team.cluster_api import RefusedError, UnansweredError
from rlrun.ui.team.gate import Gate

Json = dict[str, Any]
ANN, BOB = "token-of-ann", "token-of-bob"
ENDLESS = "/api/events"
API_SERVER = "https://kubernetes.default.svc"


def rlrun(namespace: str, name: str, *, claim: str = "data", path: str | None = None, **status: Any) -> Json:
    """Return a run that trains, with the name of its namespace in all of its texts."""
    word = f"{namespace}-{name}"
    return {
        "apiVersion": "rlrun.io/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": name, "namespace": namespace, "resourceVersion": "7", "managedFields": [{"manager": "x"}]},
        "spec": {
            "model": {"path": f"/data/models/{word}"},
            "maxSteps": 100,
            "orchestrator": {"env": [{"name": "WANDB_API_KEY", "value": "hunter2-hunter2"}]},
            "storage": {"claimName": claim, "mountPath": "/data"},
        },
        "status": {
            "phase": "Running",
            "reason": "Training",
            "message": f"{word} trains step 12",
            "attempt": 1,
            "storage": {"claimName": claim, "size": "1Gi", "path": path or f"/data/{name}"},
            "progress": {"step": 11, "totalSteps": 100, "reward": 0.5},
            "conditions": [
                {
                    "type": "Scheduled",
                    "status": "True",
                    "reason": "AllPods",
                    "message": f"all pods of {word} have nodes",
                }
            ],
        }
        | status,
    }


@dataclass
class TeamCluster:
    """State of the API server. It grants the page's account every request."""

    users: dict[str, Json] = field(default_factory=dict)
    """Users by token; `audiences` are those of the token."""
    rights: set[tuple[str, str, str, str]] = field(default_factory=set)
    """Granted reads: user, namespace, name or `*`, subresource."""
    runs: dict[tuple[str, str], Json] = field(default_factory=dict)
    down: str | None = None
    """Failure that a request gets in place of an answer."""
    closes: bool = False
    """Over HTTP: whether it closes a connection after each answer, without notice."""
    brought: list[tuple[str, int]] = field(default_factory=list)
    """Over HTTP: header Authorization and port of every request."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""

    def count(self, path: str) -> int:
        """Return the number of requests to a path."""
        return sum(one == path for _, one in self.asked)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """See `rlrun.ui.team.cluster_api.Api`."""
        self._asked("GET", path)
        if (
            found := re.fullmatch(r"/apis/rlrun\.io/v1alpha1(?:/namespaces/([^/]+))?/rlruns(?:/([^/]+))?", path)
        ) is not None:
            namespace, name = found.groups()
            if name is None:
                return {"items": [run for key, run in self.runs.items() if namespace in (None, key[0])]}
            if (namespace, name) in self.runs:
                return self.runs[namespace, name]
            raise RefusedError(404, f'rlruns.rlrun.io "{name}" not found')
        if "/leases/" in path:
            return {
                "metadata": {"annotations": {"rlrun.io/step": "11"}},
                "spec": {"renewTime": "2026-11-26T00:00:00.0Z"},
            }
        return {"items": self._about(path, (query or {}))}

    def _about(self, path: str, query: Mapping[str, str]) -> list[Json]:
        namespace, kind = path.split("/")[-2:]
        run = next(iter(query.values())).rpartition("=")[2]
        word = f"{namespace}-{run}"
        if kind == "pods":
            meta = {"name": f"{run}-trainer-1-0", "labels": {"rlrun.io/role": "trainer", "rlrun.io/attempt": "1"}}
            return [{"metadata": meta, "spec": {"nodeName": f"node-{word}"}, "status": {"phase": "Running"}}]
        event = {"reason": "Started", "type": "Normal", "lastTimestamp": "2026-11-26T00:00:00Z"}
        return [{**event, "message": f"attempt 1 of {word}"}]

    def post(self, path: str, body: Mapping[str, Any]) -> Json:
        """See `rlrun.ui.team.cluster_api.Api`."""
        self._asked("POST", path)
        spec = body["spec"]
        if path == TOKEN_REVIEWS:
            user = self.users.get(spec["token"])
            meant = set(spec.get("audiences") or (API_SERVER,)) & set((user or {}).get("audiences", (API_SERVER,)))
            if user is None or not meant:
                return {"status": {"authenticated": False, "error": "invalid bearer token"}}
            return {"status": {"authenticated": True, "user": user["user"], "audiences": sorted(meant)}}
        assert path == ACCESS_REVIEWS, path
        wanted = spec["resourceAttributes"]
        assert (wanted["verb"], wanted["group"], wanted["resource"]) == ("get", "rlrun.io", "rlruns")
        asked = [
            (spec["user"], wanted["namespace"], name, wanted.get("subresource", "")) for name in (wanted["name"], "*")
        ]
        return {"status": {"allowed": bool(self.rights & set(asked))}}

    def _asked(self, method: str, path: str) -> None:
        self.asked.append((method, path))
        if self.down is not None:
            raise UnansweredError(f"the API server does not respond: {self.down}")


def routes(gate: Gate) -> list[APIRoute]:
    """Return all routes of the page's API with a single answer."""
    app = gate._app
    assert isinstance(app, FastAPI)
    every = [route for route in app.routes if getattr(route, "path", "").startswith("/api")]
    found = [route for route in every if isinstance(route, APIRoute)]
    assert len(found) == len(every), "a route of another kind is tried by nobody"
    return [route for route in found if route.path not in (ENDLESS, "/api/{rest:path}")]


def place(route: APIRoute, run: str) -> str:
    """Return the address of a route about a run."""
    return re.sub(r"\{[^}]*\}", "0", route.path.replace("{run}", run))


def query(runs: Sequence[str]) -> dict[str, Any]:
    """Return a query that every route accepts."""
    return {"step": 3, "metric": "loss", "run": runs}


def two_teams() -> TeamCluster:
    """Return Ann of team-a and Bob of team-b, each with a run `demo` and the rights to see it and its files."""
    made = TeamCluster()
    for token, name, namespace in ((ANN, "ann", "team-a"), (BOB, "bob", "team-b")):
        made.users[token] = {"user": {"username": name, "uid": name, "groups": ["system:authenticated"]}}
        made.rights |= {(name, namespace, "*", ""), (name, namespace, "*", "files")}
        made.runs[namespace, "demo"] = rlrun(namespace, "demo")
    return made


@contextmanager
def over_http(cluster: TeamCluster) -> Iterator[str]:
    """Yield the address of an HTTP server with the cluster's answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            place = urlsplit(self.path)
            self._answer(lambda: cluster.get(place.path, dict(parse_qsl(place.query))))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(lambda: cluster.post(self.path, body))

        def _answer(self, ask: Any) -> None:
            cluster.brought.append((self.headers["Authorization"], self.client_address[1]))
            try:
                status, document = 200, ask()
            except RefusedError as error:
                status, document = error.status, {"kind": "Status", "message": str(error)}
            except UnansweredError as error:
                status, document = 503, {"kind": "Status", "message": str(error)}
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = cluster.closes

        def log_message(self, format: str, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True  # an open connection would delay the end

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
