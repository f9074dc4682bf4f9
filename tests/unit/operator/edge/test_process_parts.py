"""Settings, preflight, health, watches, metrics, log: the small parts of the process."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, get_args

import aiohttp
import pytest
from kubernetes.client import Configuration
from prometheus_client import CollectorRegistry, generate_latest

from rlrun.api.status import Phase
from rlrun_operator.decide.state_machine import decide
from rlrun_operator.kube.kubeconfig import Connection
from rlrun_operator.kube.resources import BY_KIND, POD, STATEFUL_SET, WATCHED, Resource
from rlrun_operator.manager import Operator
from rlrun_operator.runtime import health, log_setup, preflight
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.metrics import PHASES, Metrics
from rlrun_operator.runtime.watch_health import STALE_SECONDS, Stream, Watches
from rlrun_operator.settings import OperatorSettings, SettingsError, from_environment
from rlrun_operator.state import Manifest
from tests.unit.operator.edge.fake_api import FakeApi, serving
from tests.unit.operator.edge.test_store import make

GOOD = {
    "RLRUN_OPERATOR_NAME": "team-a",
    "RLRUN_WATCH_NAMESPACES": "team-b, team-a,",
    "RLRUN_TRAINER_IMAGE": "reg/t:1",
    "RLRUN_ORCHESTRATOR_IMAGE": "reg/o:1",
    "RLRUN_INFERENCE_IMAGE": "reg/i:1",
    "RLRUN_IMAGE_PULL_POLICY": "IfNotPresent",
    "RLRUN_CLUSTER_DOMAIN": "k8s.example",
    "RLRUN_READ_NODES": "true",
    "RLRUN_LOG_LEVEL": "warning",
    "RLRUN_LOG_FORMAT": "json",
    "RLRUN_LEASE_NAME": "team-b-rlrun-operator",
    "RLRUN_HTTP_PORT": "9000",
    "POD_NAME": "op-0",
    "POD_NAMESPACE": "rl-system",
}


def test_every_variable_is_read() -> None:
    settings = from_environment(GOOD)
    assert (settings.name, settings.namespaces) == ("team-a", ("team-a", "team-b"))
    assert settings.render.images == {"trainer": "reg/t:1", "orchestrator": "reg/o:1", "inference": "reg/i:1"}
    assert (settings.render.image_pull_policy, settings.render.cluster_domain) == ("IfNotPresent", "k8s.example")
    assert (settings.read_nodes, settings.log_level, settings.log_format, settings.http_port) == (
        True,
        "warning",
        "json",
        9000,
    )
    assert (settings.pod_name, settings.pod_namespace) == ("op-0", "rl-system")
    assert settings.lease_name == "team-b-rlrun-operator"


def test_an_empty_environment_is_a_good_one() -> None:
    settings = from_environment(dict.fromkeys(GOOD, ""))
    assert settings.namespaces == ()
    assert settings.render == OperatorSettings().render
    assert settings.pod_name, "a name for the Lease is made up"
    assert settings.pod_name != from_environment({}).pod_name


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("RLRUN_WATCH_NAMESPACES", "team_a,b", "'team_a' is not a namespace"),
        ("RLRUN_OPERATOR_NAME", "Team A", "lower-case letters"),
        ("RLRUN_TRAINER_IMAGE", "reg/t 1", "holds no blanks"),
        ("RLRUN_IMAGE_PULL_POLICY", "Sometimes", "Always, IfNotPresent, Never"),
        ("RLRUN_CLUSTER_DOMAIN", "http://x", "cluster.local"),
        ("RLRUN_READ_NODES", "yes", "true, false"),
        ("RLRUN_LOG_LEVEL", "loud", "debug, info, warning, error"),
        ("RLRUN_LOG_FORMAT", "xml", "plain, json"),
        ("RLRUN_LEASE_NAME", "Team B", "lower-case letters"),
        ("RLRUN_HTTP_PORT", "80800", "1 to 65535"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(name: str, value: str, fix: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert fix in str(caught.value)


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(SettingsError, match=r"READ_NODES.*HTTP_PORT|HTTP_PORT.*READ_NODES"):
        from_environment({"RLRUN_READ_NODES": "1", "RLRUN_HTTP_PORT": "x"})


REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


def rules(**override: Any) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in preflight.NEEDED
    ]


class RulesApi(FakeApi):
    """Answers rules reviews."""

    def __init__(self, granted: list[dict[str, Any]], *, crd: bool = True) -> None:
        super().__init__()
        self.granted = granted
        if crd:
            self.seed("/apis/rlrun.io/v1alpha1", {"resources": [{"name": "rlruns"}]})

    def _list(self, request: Any, path: str, body: Any) -> Any:
        return self._get(request, path, body)

    def _create(self, request: Any, path: str, body: Any) -> Any:
        assert path == REVIEW
        body["metadata"] = {"name": "review"}
        return super()._create(request, path, body | {"status": {"resourceRules": self.granted}})


async def test_a_missing_crd_is_told_with_the_command_that_installs_it() -> None:
    async with serving(RulesApi(rules(), crd=False)) as client:
        (problem,) = await preflight.problems(client, ["team-a"], "rl-system")
    assert "rlruns.rlrun.io/v1alpha1" in problem
    assert "helm install rlrun-crds charts/rlrun-crds" in problem


async def test_missing_rights_are_told_by_verb_resource_and_namespace() -> None:
    granted = [rule for rule in rules() if rule["resources"] not in (["deployments"], ["rlruns/status"])]
    granted.append({"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "list", "watch"]})
    async with serving(RulesApi(granted)) as client:
        found = await preflight.problems(client, ["team-a"], "rl-system")
    assert len(found) == 2
    assert any("create, patch, delete deployments.apps in namespace team-a" in problem for problem in found)
    assert any("patch rlruns/status.rlrun.io in namespace team-a" in problem for problem in found)


async def test_enough_rights_are_enough() -> None:
    async with serving(RulesApi(rules())) as client:
        assert await preflight.problems(client, [], "rl-system") == []
    everything = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    assert preflight.lacking(everything) == []
    assert preflight.lacking([everything[0] | {"resourceNames": ["one"]}]), "a right on one object is not the right"


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_health_tells_what_is_wrong(unused_port: int) -> None:
    state: dict[str, Any] = {"still": 0.0, "work": 0.0, "lag": 0.0, "missing": [], "dead": [], "leader": None}
    answers = health.Health(
        standstill=lambda: state["still"],
        longest_work=lambda: state["work"],
        lag=lambda: state["lag"],
        dead=lambda: state["dead"],
        stands_by=lambda: state["leader"],
        not_ready=lambda: state["missing"],
    )
    site = await health.serve(answers, CollectorRegistry(), unused_port)
    try:
        assert await get(unused_port, "/livez") == (200, "ok\n")
        assert await get(unused_port, "/readyz") == (200, "ok\n")
        state["leader"] = "operator-7"
        assert await get(unused_port, "/readyz") == (200, "ok, standing by: operator-7 leads\n")
        state["missing"] = ["the store is not filled yet: pods in team-a"]
        assert (await get(unused_port, "/livez"))[0] == 200, "a restart would not fill the store"
        assert await get(unused_port, "/readyz") == (503, "the store is not filled yet: pods in team-a\n")
        dead = ["the watch of pods in team-a brings nothing"]
        for name, value, word in (
            ("still", 61.0, "no worker"),
            ("work", 181.0, "work"),
            ("lag", 6.0, "event loop"),
            ("dead", dead, "pods in team-a"),
        ):
            before = state[name]
            state[name] = value
            status, text = await get(unused_port, "/livez")
            assert (status, word in text) == (503, True), text
            state[name] = before
        assert (await get(unused_port, "/livez"))[0] == 200
        assert (await get(unused_port, "/metrics"))[0] == 200
    finally:
        await site.close()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


LISTED = {
    "metadata": {"resourceVersion": "5", "continue": "a-token"},
    "items": [{"metadata": {"name": "p", "namespace": "team-a"}}],
}


class Kopf:
    """Sends requests through the middleware as kopf's session would."""

    def __init__(self, resource: Resource = POD, known: Callable[[Manifest], bool] = lambda found: False) -> None:
        self.time = 0.0
        self.listed: list[Stream] = []
        self.accepts: list[str] = []
        self.stream = Stream(resource, "team-a")
        self.watches = Watches([self.stream], on_listed=self.listed.append, known=known, clock=lambda: self.time)

    async def send(
        self, *, watch: bool, chunks: tuple[bytes, ...] = (), status: int = 200, at: tuple[float, ...] = ()
    ) -> bytes:
        from yarl import URL

        class Content:
            async def iter_chunked(self, size: int) -> Any:
                for chunk in chunks:
                    yield chunk

        class Response:
            def __init__(self) -> None:
                self.status, self.content = status, Content()

            async def read(self) -> bytes:
                return json.dumps(LISTED).encode()

        class Request:
            method = "GET"
            url = URL("http://api" + self.stream.resource.path("team-a")).with_query({"watch": "true"} if watch else {})

            def __init__(self) -> None:
                self.headers = {"Accept": "application/json"}

        async def handler(request: Any) -> Any:
            self.accepts.append(request.headers["Accept"])
            return Response()

        response: Any = await self.watches.middleware(Request(), handler)  # type: ignore[arg-type]
        if not watch:
            return bytes(response._body)
        received = b""
        if watch and status == 200:
            times = iter(at)
            async for chunk in response.content.iter_chunked(1):
                received += chunk
                self.time = next(times, self.time)
        return received


async def test_a_watch_that_opens_after_a_list_asks_for_a_comparison_and_one_that_continues_does_not() -> None:
    kopf = Kopf()
    await kopf.send(watch=False)
    assert kopf.listed == []
    assert kopf.watches.stale() == [kopf.stream], "listed is not watched"
    await kopf.send(watch=True, status=410)
    assert kopf.listed == []
    await kopf.send(watch=True)
    assert kopf.listed == [kopf.stream]
    await kopf.send(watch=True)
    assert kopf.listed == [kopf.stream]
    await kopf.send(watch=False)
    await kopf.send(watch=True)
    assert len(kopf.listed) == 2, "after a 410 kopf lists anew: deletions in between were never told"


async def test_of_a_list_kopf_gets_where_its_watch_begins_and_no_item_or_further_page() -> None:
    found = json.loads(await Kopf().send(watch=False))
    assert (found["metadata"], found["items"]) == ({"resourceVersion": "5"}, [])


async def test_a_watch_is_fresh_while_anything_comes_and_stale_when_nothing_does() -> None:
    kopf = Kopf()
    await kopf.send(watch=True, chunks=(b'{"type":"BOOKMARK"}\n', b'{"type":"BOOKMARK"}\n'), at=(100.0, 200.0))
    assert kopf.watches.age(kopf.stream) == pytest.approx(100.0)
    kopf.time = 100.0 + STALE_SECONDS
    assert kopf.watches.stale() == []
    kopf.time += 1.0
    assert kopf.watches.stale() == [kopf.stream]


async def test_kopf_gets_every_line_whole_and_slim_however_the_network_cuts_it() -> None:
    pod = make("Pod", "p", 7, run="a", spec={"nodeName": "n", "volumes": [{"name": "v"}]}, status={"phase": "Running"})
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "9"}}}
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
    sent = b"".join(json.dumps(e).encode() + b"\n" for e in ({"type": "ADDED", "object": pod}, bookmark, error))
    for cut in (1, 50, len(sent)):
        kopf = Kopf()
        chunks = tuple(sent[i : i + cut] for i in range(0, len(sent), cut))
        added, *others = map(json.loads, (await kopf.send(watch=True, chunks=chunks)).splitlines())
        assert others == [bookmark, error]
        assert added["type"] == "ADDED"
        assert added["object"]["metadata"]["resourceVersion"] == "7"
        assert added["object"]["spec"] == {"nodeName": "n"}
        assert "managedFields" not in added["object"]["metadata"]
    unreadable = (b"not json\n", b'{"type":"ADDED"}\n', sent, b'{"ha')
    assert (await Kopf().send(watch=True, chunks=unreadable)).count(b"\n") == 3, "one bad line costs no other"


async def test_of_a_part_no_more_than_its_metadata_is_asked_for_and_kept() -> None:
    def event(kind: str, version: int, *fields: str) -> bytes:
        found = make("PartialObjectMetadata", "a-trainer", version, run="a")
        held = {"f:spec": {f"f:{name}": {} for name in fields}}
        mine = {"manager": "rlrun-operator", "operation": "Apply", "fieldsV1": held}
        other = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:ports": {}}}}
        found["metadata"]["managedFields"] = [other, mine]
        return json.dumps({"type": kind, "object": found}).encode() + b"\n"

    kopf, store = Kopf(BY_KIND["Service"]), Store()
    told = await kopf.send(
        watch=True, chunks=(event("ADDED", 1, "ports"), event("MODIFIED", 2, "ports"), event("MODIFIED", 3))
    )
    await kopf.send(watch=False)
    assert [each.split(";")[1] for each in kopf.accepts] == ["as=PartialObjectMetadata", "as=PartialObjectMetadataList"]
    found = [json.loads(line)["object"] for line in told.splitlines()]
    assert [each["metadata"]["resourceVersion"] for each in found] == ["1", "3"], (
        "the second one changes nothing that is read"
    )
    assert {each["kind"] for each in found} == {"Service"}
    assert "managedFields" not in found[0]["metadata"]
    for each in found:
        store.put(each, 0.0)
    (kept,) = store.children(("ns", "a"))
    assert json.loads(kept["held"]) == {"f:metadata": {}, "f:spec": {}}


async def test_kopf_is_spared_the_echo_of_an_own_write() -> None:
    def event(kind: str, version: int, phase: str) -> bytes:
        return (
            json.dumps({"type": kind, "object": make("Pod", "p", version, run="a", status={"phase": phase})}).encode()
            + b"\n"
        )

    store = Store()
    store.put(make("Pod", "p", 2, run="a", status={"phase": "Pending"}), 0.0)
    kopf = Kopf(known=store.knows)
    sent = (event("ADDED", 2, "Pending"), event("MODIFIED", 3, "Running"), event("DELETED", 4, "Running"))
    told = [json.loads(line) for line in (await kopf.send(watch=True, chunks=sent)).splitlines()]
    assert [each["type"] for each in told] == ["MODIFIED", "DELETED"]
    assert not store.knows(told[0]["object"]), "what is asked is whether the store would take it in"
    store.put(told[0]["object"], 0.0)
    assert store.knows(told[0]["object"])
    other = make("Pod", "p", 9, run="a")
    other["metadata"]["uid"] = "another"
    assert not store.knows(other)
    uid = told[1]["object"]["metadata"]["uid"]
    store.remove("Pod", "ns", "p", uid)
    assert store.knows(told[0]["object"]), "a late event of what is gone"


async def test_kopf_is_spared_events_that_change_nothing_that_is_read() -> None:
    def event(version: int, *, kind: str = "MODIFIED", replicas: int = 2, ready: int = 0) -> bytes:
        status = {"replicas": 2, "readyReplicas": ready, "observedGeneration": 1}
        sts = make("StatefulSet", "t", version, run="a", spec={"replicas": replicas}, status=status)
        return json.dumps({"type": kind, "object": sts}).encode() + b"\n"

    kopf = Kopf(STATEFUL_SET)
    events = (
        event(1, kind="ADDED"),
        event(2, ready=1),
        event(3, ready=2),
        event(4, replicas=0),
        event(5),
        event(6, kind="DELETED"),
    )
    told = (await kopf.send(watch=True, chunks=events)).splitlines()
    assert [json.loads(line)["object"]["metadata"]["resourceVersion"] for line in told] == ["1", "4", "5", "6"]
    assert await kopf.send(watch=True, chunks=(event(7, kind="ADDED"),)), "another life of the object"
    assert not await kopf.send(watch=True, chunks=(event(8, ready=1),)), "a watch that continues remembers"
    await kopf.send(watch=False)
    assert await kopf.send(watch=True, chunks=(event(9, ready=1),)), "one that begins anew does not"


def scrape(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Running", "attempt": "x", "progress": {"step": "y", "reward": [], "lastStepTime": "soon"}},
        {"phase": ["Running"], "progress": [], "checkpoint": 3, "attempt": None},
        {
            "progress": {"step": 2**70, "lastStepTime": "0001-01-01T00:00:00+14:00"},
            "checkpoint": {"stepsLostTotal": {}},
        },
    ],
)
def test_a_status_of_nonsense_hides_no_other_run(status: dict[str, Any]) -> None:
    store = Store()
    store.put(make("RLRun", "nonsense", 1, status=status), 0.0)
    store.put(make("RLRun", "well", 2, status={"phase": "Running", "attempt": 2}), 0.0)
    metrics = Metrics(store)
    metrics.status_written(("ns", "nonsense"), {"restarts": 0}, {"restarts": 1, "lastFailure": "x"}, 0.0)
    text = scrape(metrics)
    assert 'rlrun_attempt{namespace="ns",run="well"} 2.0' in text
    assert 'rlrun_info{model="",namespace="ns",run="nonsense"' in text


def test_series_of_a_run_come_with_it_and_go_with_it() -> None:
    store = Store()
    metrics = Metrics(store)
    status = {
        "phase": "Running",
        "attempt": 2,
        "restarts": 1,
        "restartsCountedTowardsMax": 1,
        "lastFailure": {"reason": "TrainerFailed"},
        "progress": {"step": 41, "reward": 0.71, "lastStepTime": "2026-01-01T00:00:00Z"},
        "checkpoint": {"stepsLostTotal": 3},
    }
    run = make("RLRun", "a", 1, spec={"model": {"name": "Qwen/Qwen3-8B"}}, status=status)
    gpu = {"limits": {"nvidia.com/gpu": "8"}}
    pod = make("Pod", "p", 1, run="a", spec={"nodeName": "n", "containers": [{"name": "trainer", "resources": gpu}]})
    pod["metadata"]["labels"]["rlrun.io/role"] = "trainer"
    waiting = make("Pod", "q", 1, run="a", spec={"containers": [{"name": "trainer", "resources": gpu}]})
    for found in (run, pod, waiting):
        store.put(found, 0.0)
    key = ("ns", "a")
    metrics.status_written(key, {}, {"phase": "Starting"}, 10.0)
    metrics.status_written(key, {"phase": "Starting"}, status, 40.0)
    text = scrape(metrics)
    labels = 'namespace="ns",run="a"'
    for line in (
        f'rlrun_info{{model="Qwen/Qwen3-8B",{labels},uid="uid-RLRun-a"}} 1.0',
        'rlrun_phase{namespace="ns",phase="Running",run="a"} 1.0',
        'rlrun_phase{namespace="ns",phase="Failed",run="a"} 0.0',
        f"rlrun_step{{{labels}}} 41.0",
        f"rlrun_reward{{{labels}}} 0.71",
        f"rlrun_last_step_timestamp_seconds{{{labels}}} 1.7672256e+09",
        f"rlrun_steps_lost_total{{{labels}}} 3.0",
        'rlrun_restarts_total{counted="true",namespace="ns",reason="TrainerFailed",run="a"} 1.0',
        'rlrun_gpus_allocated{namespace="ns",role="trainer",run="a"} 8.0',
        'rlrun_phase_duration_seconds_sum{phase="Starting"} 30.0',
    ):
        assert line in text, (line, text)
    store.remove("RLRun", "ns", "a", "uid-RLRun-a")
    metrics.forget(key)
    assert 'run="a"' not in scrape(metrics)


def test_roles_that_nobody_has_make_no_series() -> None:
    """Anybody may label a pod, and each value would be a series of its own."""
    store = Store()
    store.put(make("RLRun", "a", 1, spec={}), 0.0)
    gpu = {"limits": {"nvidia.com/gpu": "8"}}
    for role in ("mine", "x" * 63):
        pod = make("Pod", role, 1, run="a", spec={"nodeName": "n", "containers": [{"name": "c", "resources": gpu}]})
        pod["metadata"]["labels"]["rlrun.io/role"] = role
        store.put(pod, 0.0)
    assert "rlrun_gpus_allocated{" not in scrape(Metrics(store))


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_has_a_series_in_each_phase(phase: str) -> None:
    store = Store()
    store.put(make("RLRun", "a", 1, spec={}, status={"phase": phase}), 0.0)
    series = [line for line in scrape(Metrics(store)).splitlines() if line.startswith("rlrun_phase{")]
    assert len(series) == len(get_args(Phase)) - 1, "Unserved is no phase of a run that an operator serves"
    assert [line for line in series if line.endswith(" 1.0")] == [
        f'rlrun_phase{{namespace="ns",phase="{phase}",run="a"}} 1.0'
    ]


def test_every_watched_kind_has_a_watch_age() -> None:
    metrics = Metrics(Store())
    for resource in WATCHED:
        metrics.observe_watch(resource.plural, "team-a", lambda: 3.0)
    assert scrape(metrics).count("rlrun_operator_watch_age_seconds{") == len(WATCHED)


def test_an_unexpected_error_is_one_line_that_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        for log_format in ("plain", "json"):
            log_setup.set_up("info", log_format)
            try:
                json.loads("{\n")
            except ValueError as error:
                logging.getLogger("x").exception("run a: unexpected %s", log_setup.where(error))
            (line,) = capsys.readouterr().err.splitlines()
            assert "JSONDecodeError" in line
            assert "decoder.py:" in line
            assert "Traceback" not in line
        assert json.loads(line)["level"] == "error"
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


async def test_a_run_is_new_until_its_first_attempt_is_on_record() -> None:
    async with serving(FakeApi()) as client:
        operator = Operator(OperatorSettings(), Connection(Configuration(host=client._server)), decide)
        try:
            most = operator._workers.queue._most_new
            for number in range(most + 1):
                operator._store.put(make("RLRun", f"new-{number}", 1, spec={}, status={"phase": "Pending"}), 0.0)
                operator._workers.add(("ns", f"new-{number}"))
            operator._store.put(make("RLRun", "old", 1, spec={}, status={"phase": "Running", "attempt": 1}), 0.0)
            operator._workers.add(("ns", "old"))
            operator._workers.add(("ns", "gone"))
            now = time.monotonic()
            order = [operator._workers.queue.pop(now) for _ in range(most + 3)]
            assert order[most:] == [("ns", "old"), ("ns", "gone"), ("ns", f"new-{most}")]
        finally:
            await operator._session.close()
