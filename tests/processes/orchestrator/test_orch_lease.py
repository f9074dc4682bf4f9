"""Progress Lease against an API server with TLS: content, rate, and tolerance of outages."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from loguru import logger
from orch_simulation import API_KEY, FakeTrainer, eventually, make_config, simulate

from rlrun.local.preflight import free_port
from rlrun.orchestrator.attempt import TERMINATED, Stop
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.progress import lease as lease_module
from rlrun.orchestrator.progress.lease import ProgressLease, lease_from_environment, stall_of
from rlrun.orchestrator.progress.progress_server import Progress, ProgressServer
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.volume_faults import Trouble
from rlrun.protocol.messages import endpoints, lease_annotations
from rlrun.protocol.messages.lease_annotations import parse_load
from rlrun.runtime import exit_codes
from tests.support.waiting import result_of

PROGRESS = Progress(
    step=7, max_steps=100, policy_version=7, checkpoint_step=5, resumed_from_step=None, reward=0.51234,
    eval={}, tokens_per_second=1234.56, staleness_mean=1.5, waiting_on="trainer: training, step 8 since 12:03:04Z",
    eta_seconds=61.7, in_flight=3, errors=0,
    waiting_role="trainer", waiting_phase="training, step 8", waiting_since=1_700_000_000.5, activity=42,
)  # fmt: skip


@dataclass
class ApiServer:
    """API server that accepts patches of one Lease."""

    folder: Path
    port: int
    patches: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    refused: int = 0
    annotations: dict[str, str] = field(default_factory=dict)
    connections: list[object] = field(default_factory=list)
    """Connection of each request; the list keeps them alive."""
    drops: int = 0
    """Number of requests that end with a closed connection."""

    async def patch(self, request: web.Request) -> web.Response:
        token = (self.folder / "token").read_text().strip()
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if self.drops:
            self.drops -= 1
            assert request.transport is not None
            request.transport.close()
        self.connections.append(request.transport)
        assert request.path == "/apis/coordination.k8s.io/v1/namespaces/team-a/leases/demo-progress"
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        if self.status != 200:
            self.refused += 1
            return web.json_response({"kind": "Status", "message": "the server is sick"}, status=self.status)
        document = json.loads(await request.text())
        self.patches.append(document)
        for key, value in document["metadata"]["annotations"].items():
            self.annotations.pop(key, None)
            if value is not None:
                assert isinstance(value, str)
                self.annotations[key] = value
        return web.json_response({"metadata": {"annotations": self.annotations}})

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        application = web.Application()
        application.router.add_patch("/{path:.*}", self.patch)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.folder / "ca.crt", self.folder / "key")
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context).start()
        try:
            yield
        finally:
            await runner.cleanup()


def make_credentials(folder: Path) -> Path:
    """Write `ca.crt` of a new authority, its key, and a token."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(folder / "key"), "-out", str(folder / "ca.crt"), "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "token").write_text("first\n")
    return folder


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Credentials of a pod of this cluster."""
    return make_credentials(tmp_path_factory.mktemp("credentials"))


@pytest.fixture
def foreign_credentials(tmp_path: Path) -> Path:
    """Credentials of a pod of another cluster."""
    return make_credentials(tmp_path)


@pytest.fixture
def server(credentials: Path) -> ApiServer:
    return ApiServer(credentials, free_port())


def make_environment(server: ApiServer) -> dict[str, str]:
    return {
        "RLRUN_PROGRESS_LEASE": "demo-progress",
        "RLRUN_NAMESPACE": "team-a",
        "RLRUN_POD_NAME": "demo-orchestrator",
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.port),
    }


def make_lease(server: ApiServer, progress: list[Progress]) -> ProgressLease:
    lease = lease_from_environment(
        make_environment(server), attempt=3, look=lambda: progress[-1], credentials=server.folder
    )
    assert lease is not None
    return lease


@pytest.fixture
def log() -> list[str]:
    """Log messages of this test."""
    messages: list[str] = []
    logger.add(messages.append, format="{message}")  # type: ignore[arg-type]
    return messages


async def test_lease_contains_progress_as_strings(server: ApiServer) -> None:
    server.annotations = {lease_annotations.RESUMED_FROM_STEP: "5", "other": "stays"}
    async with server.serve():
        await make_lease(server, [PROGRESS]).renew()
    assert server.annotations == {
        "other": "stays",
        lease_annotations.STEP: "7",
        lease_annotations.TOTAL_STEPS: "100",
        lease_annotations.POLICY_VERSION: "7",
        lease_annotations.CHECKPOINT_STEP: "5",
        lease_annotations.REWARD: "0.5123",
        lease_annotations.TOKENS_PER_SECOND: "1234.6",
        lease_annotations.STALENESS_MEAN: "1.500",
        lease_annotations.ETA_SECONDS: "62",
        lease_annotations.ATTEMPT: "3",
        lease_annotations.WAITING_ON: "trainer: training, step 8 since 12:03:04Z",
        lease_annotations.WAITING_ON_ROLE: "trainer",
        lease_annotations.WAITING_ON_PHASE: "training, step 8",
        lease_annotations.WAITING_ON_SINCE: "2023-11-14T22:13:20Z",
        lease_annotations.ACTIVITY: "42",
    }
    assert set(server.patches[0]["metadata"]["annotations"]) == set(lease_annotations.ALL)
    spec = server.patches[0]["spec"]
    assert spec["holderIdentity"] == "demo-orchestrator"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["renewTime"])
    assert abs((datetime.fromisoformat(spec["renewTime"]) - datetime.now(UTC)).total_seconds()) < 60


async def test_load_is_reported_and_wishes_are_read_from_response(server: ApiServer) -> None:
    load = {"engines": 2, "seconds": 130.51234, "steps": 4, "waited": 0.25, "ahead": 0.0, "idle": 0.0}
    load |= {"busy": 1.0, "requests": 12.0, "waiting": 0.0, "kv": 0.5}
    engine_requests = EngineRequests()
    server.annotations = {lease_annotations.ENGINES_WANTED: "3", lease_annotations.ENGINES_WINDOW: "60"}
    told = replace(PROGRESS, engine_load=load, engines_drained=("10.0.0.7", "fd00::7"))
    lease = lease_from_environment(
        make_environment(server),
        attempt=3,
        look=lambda: told,
        engine_requests=engine_requests,
        credentials=server.folder,
    )
    assert lease is not None
    async with server.serve():
        await lease.renew()
        assert (engine_requests.engines, engine_requests.window_seconds) == (3, 60.0)
        server.annotations |= {lease_annotations.ENGINES_WANTED: "nonsense", lease_annotations.ENGINES_WINDOW: "inf"}
        await lease.renew()
        assert (engine_requests.engines, engine_requests.window_seconds) == (3, 60.0), (
            "what cannot be read changes nothing"
        )
    assert server.annotations[lease_annotations.ENGINES_DRAINED] == "10.0.0.7 fd00::7"
    found = parse_load(server.annotations[lease_annotations.ENGINES])
    assert found is not None
    assert (found.engines, found.waited, found.seconds) == (2, 0.25, 130.5)


async def test_change_is_written_soon_and_idle_lease_rarely(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 1.0)
    monkeypatch.setattr(lease_module, "YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(lease_module, "CHANGE_SECONDS", 0.2)
    monkeypatch.setattr(lease_module, "LOOK_SECONDS", 0.01)
    progress = [PROGRESS]
    lease = make_lease(server, progress)
    lease._renewed = -10.0

    async def steps() -> None:
        for step in range(8, 108):
            progress.append(replace(PROGRESS, step=step, waiting_phase=f"training, step {step}"))
            await asyncio.sleep(0.01)

    async with server.serve():
        task = asyncio.create_task(lease.run())
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await steps()
        await eventually(lambda: server.annotations.get(lease_annotations.STEP) == "107")
        busy, elapsed = len(server.patches), loop.time() - began
        assert 3 <= busy <= elapsed / 0.2 + 2
        progress.append(replace(progress[-1], waiting_on="trainer: training, step 107; micro-batch 3", activity=43))
        await eventually(
            lambda: len(server.patches) == busy + 1
        )  # A running counter is not a change, but the Lease is renewed.
        assert loop.time() - began - elapsed > 0.4
        task.cancel()


async def test_api_outage_is_logged_once_and_survived(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(lease_module, "YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(lease_module, "CHANGE_SECONDS", 0.01)
    monkeypatch.setattr(lease_module, "LOOK_SECONDS", 0.01)
    lease = make_lease(server, [PROGRESS])
    task = asyncio.create_task(lease.run())
    await eventually(lambda: len(log) == 1)  # No server listens.
    server.status = 500
    async with server.serve():
        await eventually(lambda: server.refused >= 5)
        (server.folder / "token").write_text("second\n")
        server.status = 200
        await eventually(lambda: bool(server.patches))
        await eventually(lambda: len(log) == 2)
    assert not task.done()
    task.cancel()
    assert "cannot renew the progress Lease" in log[0]
    assert "is renewed again" in log[1]


async def test_unreported_and_stalled_run_becomes_unready(server: ApiServer) -> None:
    seconds, moves = 0.0, PROGRESS
    lease = ProgressLease(
        "demo-progress",
        holder="demo-orchestrator-3",
        attempt=3,
        server=lease_module.ApiServer(f"https://127.0.0.1:{server.port}", "team-a", server.folder),
        look=lambda: moves,
        clock=lambda: seconds,
    )
    stall = stall_of(lease)
    port = free_port()

    async def ready() -> tuple[int, str]:
        url = f"http://127.0.0.1:{port}{endpoints.ORCHESTRATOR_READY}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, (await answer.json())["reason"] or ""

    async with ProgressServer("127.0.0.1", port, api_key=API_KEY, look=lambda: moves, stall=stall):
        await lease.renew()  # No server listens.
        for _ in range(10):  # The run makes progress.
            seconds, moves = seconds + 200, replace(moves, activity=moves.activity + 1)
            await lease.renew()
            assert (await ready())[0] == 200
        seconds += 299
        await lease.renew()
        assert (await ready())[0] == 200
        seconds += 2
        await lease.renew()
        status, reason = await ready()
        assert status == 503
        assert "no progress for 301 s" in reason
        assert "waiting on trainer: training, step 8" in reason
        moves = replace(moves, storage=Trouble("StorageFull", "the volume is full"))
        await lease.renew()
        assert (await ready())[0] == 200, "one that waits for its volume goes on by itself"
        moves, seconds = replace(moves, storage=None), seconds + 400
        await lease.renew()
        assert (await ready())[0] == 503
        async with server.serve():
            await lease.renew()
        assert (await ready())[0] == 200, "whoever reads the Lease sees that it does not get on"
    assert stall_of(None)() is None


async def test_server_of_foreign_authority_gets_no_progress(
    server: ApiServer, foreign_credentials: Path, log: list[str]
) -> None:
    lease = lease_from_environment(
        make_environment(server), attempt=1, look=lambda: PROGRESS, credentials=foreign_credentials
    )
    assert lease is not None
    async with server.serve():
        await lease.renew()
    assert server.patches == []
    assert "certificate verify failed" in log[-1]


async def test_final_renewal_does_not_wait_for_hanging_server(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "FAREWELL_SECONDS", 0.2)
    async with await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", server.port):
        await result_of(make_lease(server, [PROGRESS]).farewell(), "the last word")


def test_process_outside_cluster_has_no_lease() -> None:
    assert lease_from_environment({}, attempt=1, look=lambda: PROGRESS) is None


async def test_last_step_is_written_before_run_ends(
    server: ApiServer, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in make_environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lease_from_environment, "__kwdefaults__", {"credentials": server.folder})
    async with server.serve():
        outcome = await simulate(make_config(tmp_path, tokenizer_folder, max_steps=4))
    assert outcome.code == exit_codes.OK
    assert server.annotations[lease_annotations.STEP] == "4"
    assert server.annotations[lease_annotations.CHECKPOINT_STEP] == "4"
    assert server.annotations[lease_annotations.POLICY_VERSION] == "4"
    assert lease_annotations.RESUMED_FROM_STEP not in server.annotations
    assert lease_annotations.STEP not in {
        key for key, value in server.patches[0]["metadata"]["annotations"].items() if value is not None
    }, "before the attempt has begun its step is not known"


async def test_later_attempt_reports_its_resume_step(
    server: ApiServer, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, tokenizer_folder, max_steps=6)
    await simulate(
        config, until=lambda trainer: len(complete_checkpoints(trainer.paths)) == 1, step_seconds=lambda: 0.05
    )
    for name, value in make_environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lease_from_environment, "__kwdefaults__", {"credentials": server.folder})
    async with server.serve():
        config = config.model_copy(update={"metrics_port": free_port()})
        assert (await simulate(config, number=2)).code == exit_codes.OK
    assert server.annotations[lease_annotations.RESUMED_FROM_STEP] == "2"
    assert server.annotations[lease_annotations.ATTEMPT] == "2"
    assert server.annotations[lease_annotations.STEP] == "6"


async def test_stopped_run_reports_its_last_checkpoint(
    server: ApiServer, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in make_environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lease_from_environment, "__kwdefaults__", {"credentials": server.folder})
    monkeypatch.setattr(lease_module, "YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(lease_module, "CHANGE_SECONDS", 3600.0)  # Without this, the Lease would be renewed in between.
    stop = Stop()
    steps: list[int] = []

    async def world(trainer: FakeTrainer) -> None:
        await eventually(lambda: len(trainer.batches) >= 2)
        trainer.task.cancel()
        assert stop.first()
        assert stop.act is not None
        stop.act()
        steps.append(len(trainer.batches))
        folder = trainer.paths.checkpoint(steps[0], 1)
        (folder / "trainer").mkdir(parents=True)
        trainer.channel.append_event("checkpoint_saved", steps[0], path=folder)
        headers, heard = {"Authorization": f"Bearer {API_KEY}"}, None
        async with aiohttp.ClientSession(f"http://127.0.0.1:{config.metrics_port}", headers=headers) as session:
            while heard != steps[0]:
                async with session.get("/rlrun/progress") as answer:
                    heard = (await answer.json())["checkpoint_step"]
        await trainer.fall_silent()

    config = make_config(tmp_path, tokenizer_folder, max_steps=1000, checkpoint={"interval": 1000})
    async with server.serve():
        outcome = await simulate(config, during=world, step_seconds=lambda: 0.02, stop=stop)
    assert outcome.code == TERMINATED
    assert server.annotations[lease_annotations.CHECKPOINT_STEP] == str(steps[0])


async def test_renewals_share_connection_until_it_or_ca_changes(server: ApiServer, log: list[str]) -> None:
    api = lease_module.ApiServer(f"https://127.0.0.1:{server.port}", "team-a", server.folder)
    lease = ProgressLease("demo-progress", holder="demo", attempt=3, server=api, look=lambda: PROGRESS)
    for _ in range(2):  # The second server does not know the connection that the first has closed.
        async with server.serve():
            for _ in range(3):
                await lease.renew()
        assert len(set(server.connections)) == 1
        server.connections.clear()
    authority = (server.folder / "ca.crt").read_text()
    try:
        async with server.serve():
            await lease.renew()
            (server.folder / "ca.crt").write_text(authority + authority)  # One more authority is trusted.
            await lease.renew()
        assert len(set(server.connections)) == 2
        async with server.serve():
            await lease.renew()
            server.drops = 1  # The connection closes at the moment of the request.
            await lease.renew()
        assert not server.drops
    finally:
        (server.folder / "ca.crt").write_text(authority)
    await api.close()
    assert not log, "a connection that was closed while it was idle is no outage"


def test_young_attempt_reports_changes_sooner(server: ApiServer) -> None:
    now = [1000.0]
    api = lease_module.ApiServer(f"https://127.0.0.1:{server.port}", "team-a", server.folder)
    lease = lease_module.ProgressLease(
        "a", holder="b", attempt=1, server=api, look=lambda: PROGRESS, clock=lambda: now[0]
    )
    assert lease._least_pause() == lease_module.YOUNG_CHANGE_SECONDS
    now[0] += lease_module.YOUNG_SECONDS
    assert lease._least_pause() == lease_module.CHANGE_SECONDS > lease_module.YOUNG_CHANGE_SECONDS
