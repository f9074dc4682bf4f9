"""Engines of another release: they get no weights, and the attempt fails if no other engine exists."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from orch_simulation import FakeEngine, eventually

from rlrun.inference.client.engine_client import EngineError
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines import weight_sync as weights
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.endpoints import OWN, PROTOCOL, REFUSED, of_header
from rlrun.runtime import exit_codes

OTHER = {"protocol": PROTOCOL + 1, "release": "9.9.9"}


class Of(FakeEngine):
    """Engine whose status reports its release."""

    told: dict[str, Any] = OTHER

    async def status(self) -> dict[str, Any]:
        return await super().status() | self.told


class Refusing(FakeEngine):
    """Engine that rejects this orchestrator's release."""

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
        raise EngineError("protocol 2 is not protocol 1", REFUSED)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FOREIGN_SECONDS", 0.05)
    monkeypatch.setattr(weights, "_CHECK_SECONDS", 0.02)


def pool_of(*engines: FakeEngine) -> tuple[EnginePool, WeightSync, asyncio.Task[None]]:
    signal = Signal()
    pool = EnginePool([Replica(f"http://{i}", engine) for i, engine in enumerate(engines)], signal)
    sync = WeightSync(pool, signal, timeout_seconds=5)
    sync.publish(1, "weights", hold=False)
    return pool, sync, asyncio.create_task(sync.run())


async def ended(handing: asyncio.Task[None]) -> RoleError:
    async with asyncio.timeout(60):
        await asyncio.wait([handing])
    error: BaseException | None = handing.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RoleError)
    return error


async def stopped(handing: asyncio.Task[None]) -> None:
    handing.cancel()
    await asyncio.gather(handing, return_exceptions=True)


async def test_run_fails_if_all_engines_have_another_release() -> None:
    engine = Of()
    _, _, handing = pool_of(engine)
    error = await ended(handing)
    assert error.code == exit_codes.CONFIGURATION
    assert f"release 9.9.9 (protocol {PROTOCOL + 1})" in str(error)
    assert f"release {OWN.release} (protocol {PROTOCOL})" in str(error)
    assert "spec.inference.image" in str(error)
    assert engine.held == [], "it got no weights"


async def test_engine_that_rejects_this_release_fails_run() -> None:
    _, _, handing = pool_of(Refusing())
    assert (await ended(handing)).code == exit_codes.CONFIGURATION


async def test_engine_of_another_release_is_left_out() -> None:
    other, good = Of(), FakeEngine()
    pool, sync, handing = pool_of(other, good)
    await eventually(lambda: pool.version == 1)
    sync.publish(2, "weights", hold=False)
    await eventually(lambda: good.held == [1, 2])
    assert other.held == []
    assert "9.9.9" in pool.replicas[0].failure
    assert not handing.done()
    await stopped(handing)


async def test_replacement_engine_of_another_release_ends_only_the_attempt() -> None:
    good = FakeEngine()
    pool, _, handing = pool_of(good)
    await eventually(lambda: pool.version == 1)
    pool.add(Replica("http://new", Of()))
    pool.remove(pool.replicas[0], "it is gone")
    assert (await ended(handing)).code == exit_codes.FAILURE, "the next attempt renews all roles"


async def test_orchestrator_waits_for_engine_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FOREIGN_SECONDS", 3600.0)
    engine = Of()
    pool, _, handing = pool_of(engine)
    await eventually(lambda: pool.replicas[0].foreign)
    engine.told = {}
    await eventually(lambda: pool.version == 1)
    assert not pool.replicas[0].foreign
    await stopped(handing)


def test_missing_release_header_means_protocol_one() -> None:
    assert of_header(None).protocol == of_header("").protocol == of_header("x").protocol == 1
    assert of_header("2 9.9.9") == (2, "9.9.9")
    assert of_header(OWN.header) == OWN
