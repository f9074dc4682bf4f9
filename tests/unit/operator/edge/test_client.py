"""Client over real HTTP: refusals, preconditions, pages and request counts."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from rlrun_operator.kube.client import REQUEST_SECONDS, WRITE_SECONDS, ApiError, Call, UnavailableError
from rlrun_operator.kube.resources import POD, RLRUN, STATEFUL_SET
from rlrun_operator.runtime.leases import NotLeadingError
from tests.unit.operator.edge.fake_api import FakeApi, serve_api

PODS = "/api/v1/namespaces/ns/pods"
RBAC = 'pods "p" is forbidden: User "system:serviceaccount:ns:op" cannot create resource "pods" in API group ""'
QUOTA = 'pods "p" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3, limited: pods=3'
SECURITY = 'pods "p" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


def make_pod(name: str = "p") -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns"}}


@pytest.mark.parametrize(
    ("status", "message", "verdict"),
    [
        (403, RBAC, "lacks_permission"),
        (403, QUOTA, "kept_out"),
        (403, SECURITY, "kept_out"),
        (403, 'pods "p" is forbidden: no PriorityClass with name high was found', "kept_out"),
        (400, 'admission webhook "guard.example.com" denied the request: no', "kept_out"),
        (500, 'Internal error occurred: failed calling webhook "guard.example.com": connection refused', "kept_out"),
        (
            422,
            "pods \"p\" is forbidden: ValidatingAdmissionPolicy 'team' with binding 'team' denied request: no",
            "kept_out",
        ),
        *[
            (status, 'admission webhook "guard.example.com" denied the request: its database is away', "kept_out")
            for status in (404, 409, 413, 429, 500, 503, 504)
        ],
        (504, "Timeout: request did not complete within requested timeout - context deadline exceeded", "kept_out"),
        (422, "spec.containers[0].image: Required value", "refused"),
        (400, "json: unknown field", "refused"),
        (500, "failed to create typed patch object (ns/p): .spec.nodeSelectr: field not declared in schema", "refused"),
        (403, 'pods "p" is forbidden: error looking up service account ns/a: serviceaccount "a" not found', ""),
        (403, "statefulsets.apps is forbidden: not yet ready to handle request", ""),
        (404, "namespaces ns not found", ""),
        (409, "the object has been modified", ""),
    ],
)
async def test_refusal_is_classified_by_status_and_message(status: int, message: str, verdict: str) -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (status, "Timeout" if message.startswith("Timeout") else "Reason", message)
    async with serve_api(api) as client:
        with pytest.raises(ApiError) as caught:
            await client.apply(make_pod())
        assert client._answering_since is not None, "a verdict is an answer"
    error = caught.value
    assert [n for n in ("lacks_permission", "kept_out", "refused") if getattr(error, n)] == (
        [verdict] if verdict else []
    )
    assert message in str(error)
    assert f"{PODS}/p" in str(error)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_busy_api_server_is_unavailable(status: int) -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (status, "Reason", "etcd is away")
    async with serve_api(api) as client:
        with pytest.raises(UnavailableError, match=f"{status} etcd is away"):
            await client.apply(make_pod())


@pytest.mark.parametrize("status", [404, 409])
async def test_webhook_refusal_with_precondition_status_is_withheld(status: int) -> None:
    """Otherwise a pod would count as deleted, or an object as changed, and each pass would retry."""
    api = FakeApi()
    api.hook = lambda verb, path, body: (
        status,
        "AlreadyExists",
        'admission webhook "guard" denied the request: frozen',
    )
    async with serve_api(api) as client:
        for attempt in (
            client.create(make_pod()),
            client.apply_over(make_pod(), "7"),
            client.delete(POD, "ns", "p", uid="uid"),
        ):
            with pytest.raises(ApiError, match="frozen") as caught:
                await attempt
            assert caught.value.is_withheld


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413, 422, 500, 504])
async def test_load_balancer_error_page_is_unavailable(status: int) -> None:
    """A 404 page of a load balancer must not make a run count as deleted."""

    class Balancer(FakeApi):
        async def handle(self, request: web.Request) -> web.Response:
            return web.Response(status=status, text="<html><h1>default backend</h1></html>", content_type="text/html")

    async with serve_api(Balancer()) as client:
        for attempt in (
            client.create(make_pod()),
            client.apply(make_pod()),
            client.apply_over(make_pod(), "7"),
            client.scale(STATEFUL_SET, "ns", "p", 0, uid="uid"),
            client.merge_patch(RLRUN, "ns", "p", {}, subresource="status"),
            client.delete(POD, "ns", "p", uid="uid"),
        ):
            with pytest.raises(UnavailableError, match=rf"{status}.*default backend"):
                await attempt


async def test_read_timeout_is_unavailable() -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (504, "Timeout", "request did not complete within requested timeout")
    async with serve_api(api) as client:
        with pytest.raises(UnavailableError):
            await client.get(POD, "ns", "p")


async def test_write_timeout_covers_webhook_timeouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes allows a webhook 10 s by default, and the API server reports its name after that."""
    waits: list[float] = []
    timeout = aiohttp.ClientTimeout

    def noted(*, total: float, sock_connect: float) -> aiohttp.ClientTimeout:
        waits.append(total)
        return timeout(total=total, sock_connect=sock_connect)

    async with serve_api(FakeApi()) as client:
        monkeypatch.setattr(aiohttp, "ClientTimeout", noted)
        await client.apply(make_pod(), dry_run=True)
        await client.apply(make_pod())
        await client.get(POD, "ns", "p")
        assert waits == [WRITE_SECONDS, WRITE_SECONDS, REQUEST_SECONDS]
    assert WRITE_SECONDS > 34


async def test_timeout_and_refused_connection_are_unavailable() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        with pytest.raises(UnavailableError, match="no answer within"):
            await client.request(Call("GET", "get", "pods", PODS), seconds=1e-6)
        client._server = "http://127.0.0.1:1"
        with pytest.raises(UnavailableError):
            await client.get(POD, "ns", "p")


async def test_create_keeps_existing_object() -> None:
    api = FakeApi()
    api.seed(f"{PODS}/p", make_pod() | {"spec": {"mine": True}})
    async with serve_api(api) as client:
        assert await client.create(make_pod()) is None
    assert api.objects[f"{PODS}/p"]["spec"] == {"mine": True}


async def test_dry_run_validates_fields_and_writes_do_not() -> None:
    asked: list[tuple[str, str | None]] = []

    class Api(FakeApi):
        async def handle(self, request: web.Request) -> web.Response:
            asked.append((request.method, request.query.get("fieldValidation")))
            return await super().handle(request)

    async with serve_api(Api()) as client:
        await client.apply(make_pod(), dry_run=True)
        await client.apply(make_pod())
        await client.create(make_pod("q"))
    assert asked == [("PATCH", None), ("PATCH", "Ignore"), ("POST", "Ignore")]


async def test_deletion_spares_successor_of_the_same_name() -> None:
    api = FakeApi()
    uid = api.seed(f"{PODS}/p", make_pod())["metadata"]["uid"]
    async with serve_api(api) as client:
        assert await client.delete(POD, "ns", "p", uid="another") is None
        assert f"{PODS}/p" in api.objects
        assert await client.delete(POD, "ns", "p", uid=uid) is not None
        assert api.objects == {}
        assert await client.delete(POD, "ns", "p", uid=uid) is None


async def test_list_reads_every_page_and_adds_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun_operator.kube.client.PAGE", 2)
    api = FakeApi()
    for name in "abcde":
        api.seed(f"{PODS}/{name}", {"metadata": {}})
    async with serve_api(api) as client:
        found = [(o["kind"], o["metadata"]["name"]) async for o in client.list(POD, "ns")]
    assert found == [("Pod", name) for name in "abcde"]
    assert len(api.requests) == 3


async def test_client_without_leadership_reads_but_does_not_write() -> None:
    api = FakeApi()
    uid = api.seed(f"{PODS}/p", make_pod())["metadata"]["uid"]

    def not_leading() -> None:
        raise NotLeadingError("no")

    async with serve_api(api) as client:
        client.may_write = not_leading
        for attempt in (
            client.apply(make_pod()),
            client.create(make_pod("q")),
            client.scale(STATEFUL_SET, "ns", "p", 0, uid=uid),
            client.merge_patch(RLRUN, "ns", "p", {}, subresource="status"),
            client.delete(POD, "ns", "p", uid=uid),
        ):
            with pytest.raises(NotLeadingError):
                await attempt
        assert await client.get(POD, "ns", "p") is not None
    assert api.writes() == []


async def test_dry_runs_are_counted_separately() -> None:
    api, counted = FakeApi(), []
    async with serve_api(api) as client:
        client._count = lambda *labels: counted.append(labels)
        await client.apply(make_pod(), dry_run=True)
        await client.apply(make_pod())
        assert await client.get(POD, "ns", "none") is None
        await client.merge_patch(POD, "ns", "p", {"status": {}}, subresource="status")
    assert counted == [
        ("dry-run", "pods", "200"),
        ("apply", "pods", "201"),
        ("get", "pods", "404"),
        ("patch", "pods/status", "200"),
    ]
