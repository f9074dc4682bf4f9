"""The client over real HTTP: which refusals mean what, preconditions, pages, counting."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from rlrun_operator.kube.client import REQUEST_SECONDS, WRITE_SECONDS, ApiError, UnavailableError
from rlrun_operator.kube.resources import POD, RLRUN, STATEFUL_SET
from rlrun_operator.runtime.leases import NotLeadingError
from tests.unit.operator.edge.fake_api import FakeApi, serving

PODS = "/api/v1/namespaces/ns/pods"
RBAC = 'pods "p" is forbidden: User "system:serviceaccount:ns:op" cannot create resource "pods" in API group ""'
QUOTA = 'pods "p" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3, limited: pods=3'
SECURITY = 'pods "p" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


def pod(name: str = "p") -> dict[str, object]:
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
async def test_what_a_refusal_means(status: int, message: str, verdict: str) -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (status, "Timeout" if message.startswith("Timeout") else "Reason", message)
    async with serving(api) as client:
        with pytest.raises(ApiError) as caught:
            await client.apply(pod())
        assert client._answering_since is not None, "a verdict is an answer"
    error = caught.value
    assert [n for n in ("lacks_permission", "kept_out", "refused") if getattr(error, n)] == (
        [verdict] if verdict else []
    )
    assert message in str(error)
    assert f"{PODS}/p" in str(error)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_or_broken_api_server_is_no_verdict_on_the_object(status: int) -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (status, "Reason", "etcd is away")
    async with serving(api) as client:
        with pytest.raises(UnavailableError, match=f"{status} etcd is away"):
            await client.apply(pod())


@pytest.mark.parametrize("status", [404, 409])
async def test_a_webhook_that_refuses_with_the_status_of_a_precondition_refuses_all_the_same(status: int) -> None:
    """Else a pod would be taken for gone, and a state for another one: both would be asked for in every pass."""
    api = FakeApi()
    api.hook = lambda verb, path, body: (
        status,
        "AlreadyExists",
        'admission webhook "guard" denied the request: frozen',
    )
    async with serving(api) as client:
        for attempt in (
            client.create(pod()),
            client.apply_over(pod(), "7"),
            client.delete(POD, "ns", "p", uid="uid"),
        ):
            with pytest.raises(ApiError, match="frozen") as caught:
                await attempt
            assert caught.value.withheld


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413, 422, 500, 504])
async def test_what_is_no_word_of_the_api_server_is_no_verdict_on_a_write(status: int) -> None:
    """A load balancer's page: a run whose status met its 404 was taken for deleted, and nobody looked after it any more."""

    class Balancer(FakeApi):
        async def handle(self, request: web.Request) -> web.Response:
            return web.Response(status=status, text="<html><h1>default backend</h1></html>", content_type="text/html")

    async with serving(Balancer()) as client:
        for attempt in (
            client.create(pod()),
            client.apply(pod()),
            client.apply_over(pod(), "7"),
            client.scale(STATEFUL_SET, "ns", "p", 0, uid="uid"),
            client.merge(RLRUN, "ns", "p", {}, subresource="status"),
            client.delete(POD, "ns", "p", uid="uid"),
        ):
            with pytest.raises(UnavailableError, match=rf"{status}.*default backend"):
                await attempt


async def test_a_read_that_takes_too_long_is_no_verdict() -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (504, "Timeout", "request did not complete within requested timeout")
    async with serving(api) as client:
        with pytest.raises(UnavailableError):
            await client.get(POD, "ns", "p")


async def test_a_write_is_waited_for_as_long_as_the_api_server_waits_for_webhooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes gives a webhook 10 s unless it says otherwise, and the API server names it after that."""
    waits: list[float] = []
    timeout = aiohttp.ClientTimeout

    def noted(*, total: float, sock_connect: float) -> aiohttp.ClientTimeout:
        waits.append(total)
        return timeout(total=total, sock_connect=sock_connect)

    async with serving(FakeApi()) as client:
        monkeypatch.setattr(aiohttp, "ClientTimeout", noted)
        await client.apply(pod(), dry_run=True)
        await client.apply(pod())
        await client.get(POD, "ns", "p")
        assert waits == [WRITE_SECONDS, WRITE_SECONDS, REQUEST_SECONDS]
    assert WRITE_SECONDS > 34


async def test_no_answer_in_time_and_no_connection_are_unavailable() -> None:
    api = FakeApi()
    async with serving(api) as client:
        with pytest.raises(UnavailableError, match="no answer within"):
            await client.request("GET", "get", "pods", PODS, seconds=1e-6)
        client._server = "http://127.0.0.1:1"
        with pytest.raises(UnavailableError):
            await client.get(POD, "ns", "p")


async def test_creating_what_exists_leaves_it_alone() -> None:
    api = FakeApi()
    api.seed(f"{PODS}/p", pod() | {"spec": {"mine": True}})
    async with serving(api) as client:
        assert await client.create(pod()) is None
    assert api.objects[f"{PODS}/p"]["spec"] == {"mine": True}


async def test_only_a_dry_run_has_its_fields_checked() -> None:
    asked: list[tuple[str, str | None]] = []

    class Api(FakeApi):
        async def handle(self, request: web.Request) -> web.Response:
            asked.append((request.method, request.query.get("fieldValidation")))
            return await super().handle(request)

    async with serving(Api()) as client:
        await client.apply(pod(), dry_run=True)
        await client.apply(pod())
        await client.create(pod("q"))
    assert asked == [("PATCH", None), ("PATCH", "Ignore"), ("POST", "Ignore")]


async def test_deletion_spares_a_successor_of_the_same_name() -> None:
    api = FakeApi()
    uid = api.seed(f"{PODS}/p", pod())["metadata"]["uid"]
    async with serving(api) as client:
        assert await client.delete(POD, "ns", "p", uid="another") is None
        assert f"{PODS}/p" in api.objects
        assert await client.delete(POD, "ns", "p", uid=uid) is not None
        assert api.objects == {}
        assert await client.delete(POD, "ns", "p", uid=uid) is None


async def test_a_list_brings_every_page_and_names_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun_operator.kube.client.PAGE", 2)
    api = FakeApi()
    for name in "abcde":
        api.seed(f"{PODS}/{name}", {"metadata": {}})
    async with serving(api) as client:
        found = [(o["kind"], o["metadata"]["name"]) async for o in client.list(POD, "ns")]
    assert found == [("Pod", name) for name in "abcde"]
    assert len(api.requests) == 3


async def test_without_leadership_nothing_is_written_but_reading_works() -> None:
    api = FakeApi()
    uid = api.seed(f"{PODS}/p", pod())["metadata"]["uid"]

    def not_leading() -> None:
        raise NotLeadingError("no")

    async with serving(api) as client:
        client.may_write = not_leading
        for attempt in (
            client.apply(pod()),
            client.create(pod("q")),
            client.scale(STATEFUL_SET, "ns", "p", 0, uid=uid),
            client.merge(RLRUN, "ns", "p", {}, subresource="status"),
            client.delete(POD, "ns", "p", uid=uid),
        ):
            with pytest.raises(NotLeadingError):
                await attempt
        assert await client.get(POD, "ns", "p") is not None
    assert api.writes() == []


async def test_requests_are_counted_with_dry_runs_apart() -> None:
    api, counted = FakeApi(), []
    async with serving(api) as client:
        client._count = lambda *labels: counted.append(labels)
        await client.apply(pod(), dry_run=True)
        await client.apply(pod())
        assert await client.get(POD, "ns", "none") is None
        await client.merge(POD, "ns", "p", {"status": {}}, subresource="status")
    assert counted == [
        ("dry-run", "pods", "200"),
        ("apply", "pods", "201"),
        ("get", "pods", "404"),
        ("patch", "pods/status", "200"),
    ]
