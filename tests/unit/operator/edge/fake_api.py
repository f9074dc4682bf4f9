"""In-memory API server on loopback: objects by path, resourceVersions, preconditions, apply and merge patches."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from rlrun_operator.kube.client import Client
from tests.sim.cluster.api import merged

Json = dict[str, Any]
Hook = Callable[[str, str, Json], tuple[int, str, str] | None]
"""(verb, path, body) -> refusal as (status, reason, message), or None."""
STAMP = "2026-01-01T00:00:00Z"


class FakeApi:
    """API server with its objects and the requests it received."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.requests: list[tuple[str, str]] = []
        """(verb, path) of each request, with RBAC verbs and `dry-run` for dry runs."""
        self.grace: list[object] = []
        """Grace periods of deletions; None is the default of the object."""
        self.hook: Hook = lambda verb, path, body: None
        self.version = 100

    def seed(self, path: str, manifest: Json) -> Json:
        """Store an object as another client would."""
        name, namespace = path.rsplit("/", 1)[1], path.split("/namespaces/")[-1].split("/")[0]
        meta = {"uid": f"uid-{name}-{self.version}", "creationTimestamp": STAMP, "generation": 1}
        manifest["metadata"] = meta | {"name": name, "namespace": namespace} | manifest.get("metadata", {})
        return self._store(path, manifest)

    def writes(self) -> list[tuple[str, str]]:
        """Requests that attempted a change, without reads."""
        return [request for request in self.requests if request[0] not in ("get", "list", "dry-run")]

    def _store(self, path: str, manifest: Json) -> Json:
        self.version += 1
        manifest["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = copy.deepcopy(manifest)
        return manifest

    async def handle(self, request: web.Request) -> web.Response:
        """Route a request to its verb."""
        path, body = request.path, json.loads(await request.read() or b"{}")
        verb = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "put", "DELETE": "delete"}[request.method]
        if request.query.get("dryRun"):
            verb = "dry-run"
        elif verb == "get" and len(path.split("/")[3 if path.startswith("/api/") else 4 :]) % 2:
            verb = "list"  # .../plural or .../namespaces/NS/plural
        self.requests.append((verb, path))
        refusal = self.hook(verb, path, body)
        if refusal is not None:
            return self._refuse(*refusal)
        return getattr(self, f"_{verb.replace('-', '_')}")(request, path, body)  # type: ignore[no-any-return]

    def _get(self, request: web.Request, path: str, body: Json) -> web.Response:
        found = self.objects.get(path)
        return web.json_response(found) if found else self._refuse(404, "NotFound", f"{path} not found")

    def _list(self, request: web.Request, path: str, body: Json) -> web.Response:
        items = [found for where, found in sorted(self.objects.items()) if where.rsplit("/", 1)[0] == path]
        start, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 0)) or len(items)
        more = str(start + limit) if start + limit < len(items) else ""
        return web.json_response({"metadata": {"continue": more}, "items": items[start : start + limit]})

    def _create(self, request: web.Request, path: str, body: Json) -> web.Response:
        where = f"{path}/{body['metadata']['name']}"
        if where in self.objects:
            return self._refuse(409, "AlreadyExists", f"{where} already exists")
        return web.json_response(self.seed(where, body), status=201)

    def _dry_run(self, request: web.Request, path: str, body: Json) -> web.Response:
        if request.method == "POST" and (where := f"{path}/{body['metadata']['name']}") in self.objects:
            return self._refuse(409, "AlreadyExists", f"{where} already exists")
        return web.json_response(body)

    def _patch(self, request: web.Request, path: str, body: Json) -> web.Response:
        main = path.removesuffix("/status")
        found = copy.deepcopy(self.objects.get(main))
        if request.content_type == "application/apply-patch+yaml":
            if found is None:
                return web.json_response(self.seed(main, body), status=201)
            if body["metadata"].get("resourceVersion") not in (None, found["metadata"]["resourceVersion"]):
                return self._refuse(409, "Conflict", "the object has been modified")
            body["metadata"] = found["metadata"] | body["metadata"]
            return web.json_response(self._store(main, found | body))
        if found is None:
            return self._refuse(404, "NotFound", f"{main} not found")
        for name, refusal in (("resourceVersion", (409, "Conflict")), ("uid", (422, "Invalid"))):
            wanted = body.get("metadata", {}).get(name)
            if wanted and wanted != found["metadata"][name]:
                return self._refuse(*refusal, f"{name} does not match")
        return web.json_response(self._store(main, merged(found, body)))

    def _put(self, request: web.Request, path: str, body: Json) -> web.Response:
        """Replace only the status of an object."""
        main = path.removesuffix("/status")
        found = copy.deepcopy(self.objects.get(main))
        if found is None:
            return self._refuse(404, "NotFound", f"{main} not found")
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return self._refuse(409, "Conflict", "the object has been modified")
        return web.json_response(self._store(main, {**found, "status": body["status"]}))

    def _delete(self, request: web.Request, path: str, body: Json) -> web.Response:
        found = self.objects.get(path)
        if found is None:
            return self._refuse(404, "NotFound", f"{path} not found")
        if body["preconditions"]["uid"] != found["metadata"]["uid"]:
            return self._refuse(409, "Conflict", "uid does not match")
        self.grace.append(body.get("gracePeriodSeconds"))
        return web.json_response(self.objects.pop(path) | {"kind": "Status"})

    def _refuse(self, status: int, reason: str, message: str) -> web.Response:
        return web.json_response({"kind": "Status", "reason": reason, "message": message}, status=status)


@asynccontextmanager
async def serve_api(api: FakeApi) -> AsyncIterator[Client]:
    """Yield a client of `api` over real HTTP."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", api.handle)
    server = TestServer(app)
    await server.start_server()
    session = ClientSession()
    try:
        yield Client(session, str(server.make_url("")).rstrip("/"))
    finally:
        await session.close()
        await server.close()
