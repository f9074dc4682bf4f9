"""Engine replicas that appear, leave and are replaced during rollouts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from orch_simulation import API_KEY, FakeEngine, FakeTrainer, begin, eventually, make_config

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.attempt import first_cause
from rlrun.orchestrator.engines import discovery
from rlrun.orchestrator.engines.discovery import Discovery, resolve_addresses
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.main import Outside, orchestrate_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import read_metrics
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages import endpoints
from rlrun.runtime import exit_codes
from tests.support.waiting import result_of, wait_until_async

SERVICE = "http://run-inference.team.svc:8000"


@dataclass
class Cluster:
    """Engines by address, and a name server that returns the running ones."""

    engines: dict[str, FakeEngine] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    down: bool = False
    connections: list[str] = field(default_factory=list)

    def start(self, address: str, engine: FakeEngine | None = None) -> FakeEngine:
        self.engines[address] = engine or FakeEngine()
        self.running.append(address)
        return self.engines[address]

    async def look_up(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("run-inference.team.svc", 8000)
        if self.down:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if not self.running:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(self.running)

    def connect(self, url: str) -> FakeEngine:
        self.connections.append(url)
        return self.engines[url.removeprefix("http://").removesuffix(":8000")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.Discovery.run, "__defaults__", (0.01,))


async def orchestrate(
    config: OrchestratorConfig,
    cluster: Cluster,
    during: Callable[[FakeTrainer], object],
    step_seconds: float = 0.0,
    engine_requests: EngineRequests | None = None,
    endless: bool = False,
) -> FakeTrainer:
    """Run an orchestrator to its end, or without end until `during` returns; the coroutine function `during` controls the cluster."""
    paths = RunPaths(Path(config.output_dir))
    trainer = FakeTrainer(paths, begin(paths, 1), config.max_steps, config.checkpoint.interval, lambda: step_seconds)
    async with trainer:
        resolved = config.model_copy(update={"trainer_url": trainer.url, "inference_service": SERVICE})
        world = asyncio.create_task(during(trainer))  # type: ignore[arg-type]
        try:
            outside = Outside(cluster.connect, cluster.look_up, engine_requests=engine_requests)
            work = asyncio.ensure_future(orchestrate_attempt(resolved, attempt=1, api_key=API_KEY, outside=outside))
            if endless:
                first = asyncio.wait({work, world}, return_when=asyncio.FIRST_COMPLETED)
                await result_of(first, "the end of the run or of the cluster", progress=lambda: len(trainer.batches))
                assert not work.done(), work
            else:
                ended = await result_of(work, "the end of the run", progress=lambda: len(trainer.batches))
                assert ended == exit_codes.OK
            await result_of(world, "the end of the cluster")
        finally:
            world.cancel()
            work.cancel()
            await asyncio.gather(world, work, return_exceptions=True)
    return trainer


async def test_replicas_appear_leave_and_are_replaced_during_run(tmp_path: Path, tokenizer_folder: Path) -> None:
    cluster = Cluster()
    config = make_config(tmp_path, tokenizer_folder, max_steps=30)

    async def world(trainer: FakeTrainer) -> None:
        first = cluster.start("10.0.0.1", FakeEngine(lambda: 0.002))
        await eventually(lambda: len(trainer.batches) >= 2)
        second = cluster.start("10.0.0.2", FakeEngine(lambda: 0.002))
        await eventually(lambda: bool(second.requests))
        assert second.held[0] >= 1, "it is given the version of the day before its first request"
        cluster.running.remove("10.0.0.1")
        first.down = True
        seen, third = len(second.requests), cluster.start("10.0.0.3", FakeEngine(lambda: 0.002))
        await eventually(lambda: bool(third.requests) and len(second.requests) > seen)
        cluster.down = True  # The name server is unavailable: nothing changes.
        done = len(trainer.batches)
        await eventually(lambda: len(trainer.batches) >= min(done + 2, 30))
        cluster.down = False

    trainer = await orchestrate(config, cluster, world, step_seconds=0.02)
    assert [batch.step for batch in trainer.batches] == list(range(1, 31))
    assert cluster.connections == [f"http://10.0.0.{n}:8000" for n in (1, 2, 3)]


async def test_drained_engines_finish_requests_without_lost_rollouts(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The run continues until all events have happened, however long that takes."""
    cluster, engine_requests = Cluster(), EngineRequests()
    algorithm = {
        "max_async_level": 2,
        "max_off_policy_steps": 1000,
    }  # With this bound no group grows too old on a slow machine.
    config = make_config(tmp_path, tokenizer_folder, max_steps=100_000, algorithm=algorithm)
    engines = {f"10.0.0.{n}": cluster.start(f"10.0.0.{n}", FakeEngine(lambda: 0.003)) for n in (1, 2, 3)}
    url = f"http://127.0.0.1:{config.metrics_port}{endpoints.ORCHESTRATOR_PROGRESS}"

    async def drained() -> str:
        """Return the host of an engine that should be drained."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            found: list[str] = []

            async def is_drained() -> bool:
                async with session.get(url) as response:
                    found[:] = (await response.json())["engines_drained"]
                return bool(found) and found[0] in cluster.running

            await wait_until_async(is_drained, "an engine is drained")
            return found[0]

    async def more(trainer: FakeTrainer, steps: int) -> None:
        goal = len(trainer.batches) + steps
        await eventually(lambda: len(trainer.batches) >= goal)

    async def world(trainer: FakeTrainer) -> None:
        await eventually(lambda: all(engine.requests for engine in engines.values()))
        for wanted in (2, 1):
            engine_requests.engines = wanted
            host = await drained()
            gone, seen = engines[host], len(engines[host].requests)
            assert (gone.running, gone.aborted) == (0, 0)
            gone.down = True
            cluster.running.remove(host)
            await more(trainer, 3)
            assert len(gone.requests) == seen, "it was drained"

    trainer = await orchestrate(config, cluster, world, engine_requests=engine_requests, endless=True)
    groups = [group for batch in trainer.batches for group in {sample.group for sample in batch.samples}]
    assert len(groups) == len(set(groups)) == 4 * len(trainer.batches)
    lines = read_metrics(RunPaths(Path(config.output_dir)).metrics)[0]
    assert lines[-1]["engines/moved_requests"] == 0
    assert {key: value for line in lines for key, value in line.items() if key.startswith("groups/") and value} == {}


async def test_request_to_vanished_engine_moves_to_another(tmp_path: Path, tokenizer_folder: Path) -> None:
    cluster = Cluster()
    config = make_config(tmp_path, tokenizer_folder, max_steps=3)
    stuck = FakeEngine(lambda: 3600.0)

    async def world(trainer: FakeTrainer) -> None:
        cluster.start("10.0.0.1", stuck)
        await eventually(lambda: bool(stuck.requests))
        cluster.start("10.0.0.2")
        cluster.running.remove("10.0.0.1")

    trainer = await orchestrate(config, cluster, world)
    assert [batch.step for batch in trainer.batches] == [1, 2, 3]
    assert stuck.aborted


async def test_new_pod_with_used_address_gets_weights_again(tmp_path: Path, tokenizer_folder: Path) -> None:
    cluster = Cluster()
    config = make_config(tmp_path, tokenizer_folder, max_steps=30)

    async def world(trainer: FakeTrainer) -> None:
        cluster.start("10.0.0.1", FakeEngine(lambda: 0.002))
        cluster.start("10.0.0.2", FakeEngine(lambda: 0.002))
        await eventually(lambda: len(trainer.batches) >= 2)
        cluster.running.remove("10.0.0.1")
        await eventually(lambda: len(trainer.batches) >= 4)
        again = FakeEngine(lambda: 0.002, version=99)  # The engine belonged to another run, with a higher version.
        cluster.start("10.0.0.1", again)
        await eventually(lambda: bool(again.requests))
        assert again.held[0] <= 30

    await orchestrate(config, cluster, world, step_seconds=0.02)


async def test_run_without_engine_addresses_waits_then_fails(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlrun.orchestrator.engines import weight_sync

    monkeypatch.setattr(weight_sync, "STARTUP_SECONDS", 2.0)
    monkeypatch.setattr(weight_sync, "_CHECK_SECONDS", 0.05)

    async def world(trainer: FakeTrainer) -> None:
        return

    with pytest.raises(ExceptionGroup) as caught:
        await orchestrate(make_config(tmp_path, tokenizer_folder), Cluster(), world)
    cause = first_cause(caught.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.FAILURE
    assert "run-inference.team.svc has no address yet" in str(cause)


async def test_real_host_name_is_resolved() -> None:
    assert "127.0.0.1" in await resolve_addresses("localhost", 8000)
    with pytest.raises(OSError):
        await resolve_addresses("no-such-name.invalid", 8000)


def test_service_without_host_is_refused() -> None:
    with pytest.raises(RoleError, match="inferenceService") as caught:
        Discovery("engines", EnginePool([], Signal()), connect=Cluster().connect)
    assert caught.value.code == exit_codes.CONFIGURATION


async def test_ipv6_addresses_make_urls() -> None:
    pool = EnginePool([], Signal())

    async def look_up(host: str, port: int) -> list[str]:
        return ["fd00::1"]

    await Discovery(SERVICE, pool, connect=lambda url: FakeEngine(), look_up=look_up).look()
    assert [replica.url for replica in pool.replicas] == ["http://[fd00::1]:8000"]
