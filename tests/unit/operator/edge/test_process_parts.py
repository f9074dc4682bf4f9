"""Settings, preflight checks, health and log of the operator process."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from kubernetes.client import Configuration
from prometheus_client import CollectorRegistry

from rlrun_operator.decide.state_machine import decide
from rlrun_operator.kube.client import ApiError
from rlrun_operator.kube.connection import Connection
from rlrun_operator.manager import Operator
from rlrun_operator.runtime import log_setup, preflight, watch_health
from rlrun_operator.settings import OperatorSettings, SettingsError, from_environment
from tests.unit.operator.edge.fake_api import FakeApi, serve_api
from tests.unit.operator.edge.test_store import make_object

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


def test_settings_read_every_variable() -> None:
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


def test_empty_environment_gives_default_settings() -> None:
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
        ("RLRUN_TRAINER_IMAGE", "reg/t 1", "remove the blanks"),
        ("RLRUN_IMAGE_PULL_POLICY", "Sometimes", "Always, IfNotPresent, Never"),
        ("RLRUN_CLUSTER_DOMAIN", "http://x", "cluster.local"),
        ("RLRUN_READ_NODES", "yes", "true, false"),
        ("RLRUN_LOG_LEVEL", "loud", "debug, info, warning, error"),
        ("RLRUN_LOG_FORMAT", "xml", "plain, json"),
        ("RLRUN_LEASE_NAME", "Team B", "lower-case letters"),
        ("RLRUN_HTTP_PORT", "80800", "1 to 65535"),
    ],
)
def test_invalid_setting_is_refused_with_its_fix(name: str, value: str, fix: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert fix in str(caught.value)


def test_invalid_settings_are_reported_together() -> None:
    with pytest.raises(SettingsError, match=r"READ_NODES.*HTTP_PORT|HTTP_PORT.*READ_NODES"):
        from_environment({"RLRUN_READ_NODES": "1", "RLRUN_HTTP_PORT": "x"})


REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


def make_rules(**override: Any) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in preflight.NEEDED
    ]


class RulesApi(FakeApi):
    """API server that answers SelfSubjectRulesReviews."""

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


async def test_missing_crd_is_reported_with_the_install_command() -> None:
    async with serve_api(RulesApi(make_rules(), crd=False)) as client:
        (problem,) = await preflight.find_problems(client, ["team-a"], "rl-system")
    assert "rlruns.rlrun.io/v1alpha1" in problem
    assert "helm install rlrun-crds charts/rlrun-crds" in problem


async def test_missing_rights_are_reported_by_verb_resource_and_namespace() -> None:
    granted = [rule for rule in make_rules() if rule["resources"] not in (["deployments"], ["rlruns/status"])]
    granted.append({"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "list", "watch"]})
    async with serve_api(RulesApi(granted)) as client:
        found = await preflight.find_problems(client, ["team-a"], "rl-system")
    assert len(found) == 2
    assert any("create, patch, delete deployments.apps in namespace team-a" in problem for problem in found)
    assert any("patch rlruns/status.rlrun.io in namespace team-a" in problem for problem in found)


async def test_preflight_accepts_sufficient_rights() -> None:
    async with serve_api(RulesApi(make_rules())) as client:
        assert await preflight.find_problems(client, [], "rl-system") == []
    everything = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    assert preflight.missing_rights(everything) == []
    assert preflight.missing_rights([everything[0] | {"resourceNames": ["one"]}]), (
        "a right on one object is not the right"
    )


async def fetch_path(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_health_reports_each_problem(unused_port: int) -> None:
    state: dict[str, Any] = {"still": 0.0, "work": 0.0, "lag": 0.0, "missing": [], "dead": [], "leader": None}
    answers = watch_health.Health(
        standstill=lambda: state["still"],
        longest_work=lambda: state["work"],
        lag=lambda: state["lag"],
        dead=lambda: state["dead"],
        stands_by=lambda: state["leader"],
        not_ready=lambda: state["missing"],
    )
    site = await watch_health.serve_health(answers, CollectorRegistry(), unused_port)
    try:
        assert await fetch_path(unused_port, "/livez") == (200, "ok\n")
        assert await fetch_path(unused_port, "/readyz") == (200, "ok\n")
        state["leader"] = "operator-7"
        assert await fetch_path(unused_port, "/readyz") == (200, "ok, standing by: operator-7 leads\n")
        state["missing"] = ["the store is not filled yet: pods in team-a"]
        assert (await fetch_path(unused_port, "/livez"))[0] == 200, "a restart would not fill the store"
        assert await fetch_path(unused_port, "/readyz") == (503, "the store is not filled yet: pods in team-a\n")
        dead = ["the watch of pods in team-a brings nothing"]
        for name, value, word in (
            ("still", 61.0, "no worker"),
            ("work", 181.0, "work"),
            ("lag", 6.0, "event loop"),
            ("dead", dead, "pods in team-a"),
        ):
            before = state[name]
            state[name] = value
            status, text = await fetch_path(unused_port, "/livez")
            assert (status, word in text) == (503, True), text
            state[name] = before
        assert (await fetch_path(unused_port, "/livez"))[0] == 200
        assert (await fetch_path(unused_port, "/metrics"))[0] == 200
    finally:
        await site.close()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_unexpected_error_is_logged_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    gc.collect()  # close sessions of earlier tests now, because each logs a warning when it is collected
    gc.disable()
    try:
        for log_format in ("plain", "json"):
            log_setup.set_up("info", log_format)
            try:
                json.loads("{\n")
            except ValueError as error:
                logging.getLogger("x").exception("run a: unexpected %s", log_setup.describe_exception(error))
            (line,) = capsys.readouterr().err.splitlines()
            assert "JSONDecodeError" in line
            assert "decoder.py:" in line
            assert "Traceback" not in line
        assert json.loads(line)["level"] == "error"
    finally:
        gc.enable()
        root.handlers[:] = handlers
        root.setLevel(level)


async def test_run_is_new_until_its_first_attempt_is_recorded() -> None:
    async with serve_api(FakeApi()) as client:
        operator = Operator(OperatorSettings(), Connection(Configuration(host=client._server)), decide)
        try:
            most = operator._workers.queue._most_new
            for number in range(most + 1):
                operator._store.put(make_object("RLRun", f"new-{number}", 1, spec={}, status={"phase": "Pending"}), 0.0)
                operator._workers.add(("ns", f"new-{number}"))
            operator._store.put(make_object("RLRun", "old", 1, spec={}, status={"phase": "Running", "attempt": 1}), 0.0)
            operator._workers.add(("ns", "old"))
            operator._workers.add(("ns", "gone"))
            now = time.monotonic()
            order = [operator._workers.queue.pop(now) for _ in range(most + 3)]
            assert order[most:] == [("ns", "old"), ("ns", "gone"), ("ns", f"new-{most}")]
        finally:
            await operator._session.close()


async def test_refusal_without_status_is_posted_as_event(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        operator = Operator(OperatorSettings(), Connection(Configuration(host=client._server)), decide)
        operator._client.may_write = lambda: None
        operator._store.put(make_object("RLRun", "a", 1, spec={}, status={}), 0.0)

        async def refused(key: tuple[str, str]) -> None:
            raise ApiError(403, "Forbidden", "rlruns is forbidden: no", "patch /apis/a/status")

        monkeypatch.setattr(operator, "_reconcile_served", refused)
        try:
            with pytest.raises(ApiError):
                await operator._reconcile_run(("ns", "a"))
        finally:
            await operator._session.close()
    assert [(verb, path) for verb, path in api.writes()] == [("create", "/api/v1/namespaces/ns/events")]


LEADER_LEASE = "/apis/coordination.k8s.io/v1/namespaces/rl-system/leases/rlrun-operator"
INSTALLED = OperatorSettings(namespaces=("team-a",), pod_namespace="rl-system", lease_name="rlrun-operator")


def with_lease(api: RulesApi, *, renewed: bool) -> Callable[[float], Awaitable[None]]:
    """Add the leader Lease to `api` and return a sleep function in which a leader renews it if `renewed`."""
    api.seed(LEADER_LEASE, {"spec": {"renewTime": "1"}})

    async def sleep(seconds: float) -> None:
        if renewed:
            api.objects[LEADER_LEASE]["spec"]["renewTime"] = "2"

    return sleep


async def test_check_of_working_installation_finds_nothing() -> None:
    api = RulesApi(make_rules())
    sleep = with_lease(api, renewed=True)
    async with serve_api(api) as client:
        assert await preflight.find_faults(client, INSTALLED, sleep=sleep) == []


async def test_check_finds_operator_without_leadership() -> None:
    api = RulesApi(make_rules())
    sleep = with_lease(api, renewed=False)
    async with serve_api(api) as client:
        (fault,) = await preflight.find_faults(client, INSTALLED, sleep=sleep)
    assert "Lease rl-system/rlrun-operator was not renewed within 10 s" in fault
    assert "kubectl -n rl-system logs deployment/rlrun-operator" in fault


async def test_check_finds_missing_right_and_missing_operator() -> None:
    granted = [rule for rule in make_rules() if rule["resources"] != ["rlruns/status"]]
    async with serve_api(RulesApi(granted)) as client:
        right, lease = await preflight.find_faults(client, INSTALLED)
    assert "patch rlruns/status.rlrun.io in namespace team-a" in right
    assert "does not exist, so no operator of this release leads" in lease
