"""Weight handover on a recording engine with injected failures."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save_file
from starlette.testclient import TestClient

from rlrun.inference.heartbeat import Heartbeat
from rlrun.inference.http.routes import Control, router
from rlrun.inference.weights import handover as module
from rlrun.inference.weights.handover import Handover, HandoverError, HandoverOptions, Served
from rlrun.inference.weights.receive import RefusedError
from rlrun.protocol.messages.buckets import MANIFEST


class FakeEngine:
    """Engine that records whether it is paused, its weights and the version label of its tokens."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.paused = False
        self.weights = "start"
        self.label = "default"
        self.errored = False
        self.given_up = False

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hangs:
            await asyncio.Event().wait()
        if name in self.fails:
            raise RuntimeError(f"Traceback\n  many lines\nValueError: {name} broke")

    async def pause_generation(self, *, mode: str = "", clear_cache: bool = True) -> None:
        assert clear_cache is False
        assert mode == "keep"
        await self._called("pause")
        self.paused = True

    async def resume_generation(self) -> None:
        await self._called("resume")
        self.paused = False

    async def update_weight_version(self, new_version: str) -> None:
        await self._called("label")
        self.label = new_version

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert self.paused
        assert reset_running_requests
        await self._called("reset")
        return True

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert method == "load_version"
        assert self.paused
        assert self.label == "unknown", "while weights change no token may be labelled with a version"
        self.weights = "half"
        await self.gate.wait()
        await self._called("reload")
        self.weights = kwargs["weights_path"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("v1", "v2", "v3", "v3b"):
        (tmp_path / name).mkdir()
        save_file({"a": np.zeros(1)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "COMPLETE").touch()
    return tmp_path


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def make(engine: FakeEngine, root: Path, timeout: float, receiver: Any = None, rebuilder: Any = None) -> Handover:
    def on_broken() -> None:
        engine.given_up = True

    options = HandoverOptions(
        base_model="base", weights_dir=str(root), expected=None, timeout=timeout, on_broken=on_broken
    )
    return Handover(engine, options, receiver=receiver, rebuilder=rebuilder)


@pytest.fixture
def handover(engine: FakeEngine, root: Path, monkeypatch: pytest.MonkeyPatch) -> Handover:
    monkeypatch.setattr(module, "RESUME_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(module, "RESUME_RETRY_SECONDS", 0.01)
    return make(engine, root, 5)


async def test_update_pauses_reloads_labels_and_resumes(engine: FakeEngine, handover: Handover, root: Path) -> None:
    await handover.update("v1", 1)
    engine.calls.clear()
    outcome = await handover.update("v2", 2)
    assert engine.calls == ["pause", "label", "reload", "label", "resume"], "a higher version keeps the cache"
    assert (engine.weights, engine.label, engine.paused) == (str(root / "v2"), "2", False)
    assert handover.served == Served(2, str(root / "v2"))
    assert set(outcome.seconds) == {"pause", "reload", "resume", "total"}


class FakeReceiver:
    """Receiver for versions up to `newest`, whose folders stay in memory until they are dropped."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.newest, self.asked, self.fails = engine, 3, 0, False
        self.held: list[str] = []

    async def fetch(self, trainer_url: str, version: int) -> Path:
        assert not self.engine.paused, "an engine goes on serving until the version is whole"
        self.asked += 1
        if self.fails:
            raise RefusedError("the trainer died")
        if version > self.newest:
            raise RefusedError(f"version {version} is not in the trainer's memory", gone=True)
        self.held = [f"sent {version}"]
        return Path(self.held[0])

    def free_version(self) -> None:
        assert self.engine.weights != "half", "it is being loaded"
        self.held.clear()


async def test_received_version_follows_update_rules(engine: FakeEngine, root: Path) -> None:
    receiver = FakeReceiver(engine)
    handover = make(engine, root, 5, receiver)
    await handover.receive_version("http://trainer", 2)
    assert (engine.weights, engine.label, engine.paused) == ("sent 2", "2", False)
    assert receiver.held == [], "its memory is given back"
    assert (await handover.receive_version("http://trainer", 2)).changed is False
    assert receiver.asked == 1, "what is held is not asked for: nobody would receive it"
    with pytest.raises(HandoverError, match="version 1 is older than the served version 2"):
        await handover.receive_version("http://trainer", 1)
    assert receiver.asked == 1
    with pytest.raises(HandoverError, match="version 9 is not in the trainer's memory") as refused:
        await handover.receive_version("http://trainer", 9)
    assert (refused.value.status, engine.weights, engine.paused, handover.fault) == (404, "sent 2", False, None)

    receiver.fails = True
    with pytest.raises(HandoverError, match="the trainer died") as broken:
        await handover.receive_version("http://trainer", 3)
    assert broken.value.status == 409, "to be tried again"
    assert (engine.weights, engine.label, engine.paused, handover.fault) == ("sent 2", "2", False, None)
    assert handover.served == Served(2, "http://trainer")
    assert not engine.given_up

    receiver.fails, engine.fails = False, {"reload"}
    with pytest.raises(HandoverError, match="the engine's weights are unknown, so the server stops"):
        await handover.receive_version("http://trainer", 3)
    assert engine.given_up
    assert engine.label == "unknown"


class FakeRebuilder:
    """Rebuilder that records the folders built from differences."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.refuses = engine, False

    def make(self, folder: Path) -> Path:
        assert not self.engine.paused, "an engine goes on serving until the version is whole"
        if self.refuses:
            raise RefusedError("it is damaged")
        return Path(f"made of {folder.name}")


@pytest.fixture
def deltas(root: Path) -> Path:
    """Write versions 4 and 5 as differences."""
    for name in ("d4", "d5"):
        (root / name).mkdir()
        for file in (MANIFEST, "COMPLETE"):
            (root / name / file).touch()
    return root


async def test_difference_is_rebuilt_before_engine_pause(engine: FakeEngine, deltas: Path) -> None:
    rebuilder = FakeRebuilder(engine)
    handover = make(engine, deltas, 5, rebuilder=rebuilder)
    await handover.update("v1", 1)
    await handover.update("d4", 4)
    assert (engine.weights, engine.label, engine.paused) == ("made of d4", "4", False)
    assert handover.served == Served(4, str(deltas / "d4"))
    assert (await handover.update("d4", 4)).changed is False
    rebuilder.refuses = True
    with pytest.raises(HandoverError, match="it is damaged") as refused:
        await handover.update("d5", 5)
    assert refused.value.status == 409, "to be tried again"
    assert (engine.weights, engine.label, handover.fault, handover.served) == (
        "made of d4",
        "4",
        None,
        Served(4, str(deltas / "d4")),
    )


async def test_server_without_rebuild_memory_names_missing_option(engine: FakeEngine, deltas: Path) -> None:
    with pytest.raises(HandoverError, match=r"also set weightSync\.deltas: Auto for the engines") as refused:
        await make(engine, deltas, 5).update("d4", 4)
    assert refused.value.status == 400
    (deltas / "d4" / "COMPLETE").unlink()
    with pytest.raises(HandoverError, match="has no COMPLETE file"):
        await make(engine, deltas, 5, rebuilder=FakeRebuilder(engine)).update("d4", 4)


async def test_server_without_receiver_refuses_nccl_transfer(handover: Handover) -> None:
    with pytest.raises(HandoverError, match=r"set weightSync\.transport: NCCL"):
        await handover.receive_version("http://trainer", 1)


async def test_current_version_is_not_loaded_again(engine: FakeEngine, handover: Handover) -> None:
    await handover.update("v2", 2)
    engine.calls.clear()
    assert (await handover.update("v2", 2)).changed is False
    assert engine.calls == []
    assert (await handover.update("v2", 2, force=True)).changed is True


async def test_going_back_needs_force_and_drops_the_cache(engine: FakeEngine, handover: Handover) -> None:
    await handover.update("v2", 2)
    with pytest.raises(HandoverError, match="version 1 is older than the served version 2") as refused:
        await handover.update("v1", 1)
    assert refused.value.status == 409
    engine.calls.clear()
    await handover.update("v1", 1, force=True)
    assert "reset" in engine.calls
    await handover.update("v3", 3)
    engine.calls.clear()
    await handover.update("v3b", 3)
    assert "reset" in engine.calls, "the same version of another attempt is other weights"
    await handover.reload_base(4)
    assert engine.weights == "base"


async def test_invalid_folder_does_not_touch_engine(engine: FakeEngine, handover: Handover, root: Path) -> None:
    (root / "v1" / "COMPLETE").unlink()
    for path in ("v1", "/tmp", "nowhere"):
        with pytest.raises(HandoverError) as refused:
            await handover.update(path, 1)
        assert refused.value.status == 400
    assert engine.calls == []


async def test_failed_pause_keeps_old_weights(engine: FakeEngine, handover: Handover) -> None:
    await handover.update("v1", 1)
    engine.fails = {"pause"}
    with pytest.raises(HandoverError, match=r"pausing the engine: ValueError: pause broke; the weights are unchanged"):
        await handover.update("v2", 2)
    assert engine.calls[-1] == "resume"
    assert (engine.label, handover.fault, engine.given_up) == ("1", None, False)


@pytest.mark.parametrize("failure", ["reload", "label", "reset"])
async def test_failed_reload_stops_engine(engine: FakeEngine, handover: Handover, failure: str) -> None:
    engine.fails = {failure}
    with pytest.raises(HandoverError, match="weights are unknown") as failed:
        await handover.update("v1", 1)
    assert failed.value.status == 500
    assert engine.given_up
    assert engine.paused, "no forward pass through half-loaded weights"
    assert engine.label in ("unknown", "default"), "nothing is labelled with a version that it is not"
    assert handover.served is None
    assert "weights are unknown" in str(handover.fault)


async def test_hanging_reload_times_out(engine: FakeEngine, root: Path) -> None:
    handover = make(engine, root, 0.05)
    engine.hangs = {"reload"}
    with pytest.raises(HandoverError, match=r"no response within 0\.05 s"):
        await handover.update("v1", 1)
    assert engine.given_up
    assert not handover.is_updating


async def test_resume_is_retried_before_engine_stops(engine: FakeEngine, handover: Handover) -> None:
    engine.fails = {"resume"}
    with pytest.raises(HandoverError, match="could not be resumed"):
        await handover.update("v1", 1)
    assert engine.calls.count("resume") > 1
    assert engine.given_up


async def test_update_completes_after_caller_disconnects(engine: FakeEngine, handover: Handover) -> None:
    engine.gate.clear()
    caller = asyncio.create_task(handover.update("v1", 1))
    while engine.weights != "half":  # noqa: ASYNC110
        await asyncio.sleep(0)
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    assert handover.is_updating
    second = asyncio.create_task(handover.update("v1", 1))
    engine.gate.set()
    assert (await second).changed is False, "the second caller waits for the first update and finds it done"
    assert (engine.label, engine.paused) == ("1", False)


def app_of(handover: Handover, heartbeat: Heartbeat) -> TestClient:
    app = FastAPI()
    app.include_router(router)
    app.state.rlrun = Control(handover, heartbeat)
    return TestClient(app)


async def test_readiness_and_its_reasons(engine: FakeEngine, handover: Handover) -> None:
    answers, now = True, 100.0

    async def ask() -> None:
        if not answers:
            raise RuntimeError("worker is gone")

    heartbeat = Heartbeat(ask, interval=0.01, timeout=30, clock=lambda: now)
    http = app_of(handover, heartbeat)
    assert http.get("/rlrun/ready").json()["reason"] == "the engine does not respond"
    await heartbeat.check_workers()
    unsynced = http.get("/rlrun/ready")
    assert unsynced.status_code == 503
    assert unsynced.json()["reason"] == "no weights were loaded since the start"
    await handover.update("v1", 1)
    assert http.get("/rlrun/ready").json() == {"ready": True, "reason": None, "weight_version": 1}
    answers, now = False, now + 29
    beating = asyncio.create_task(heartbeat.run())
    async with asyncio.timeout(30):
        while heartbeat.error is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert http.head("/rlrun/ready").status_code == 200, "one failure is not a death"
    now += 1
    dead = http.get("/rlrun/ready")
    assert (dead.status_code, dead.json()["reason"]) == (503, "the engine does not respond: worker is gone")
    assert http.get("/rlrun/status").json()["engine_alive"] is False
    answers = True
    async with asyncio.timeout(30):
        while not heartbeat.is_alive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert http.head("/rlrun/ready").status_code == 200
    beating.cancel()


def test_bodies_are_checked(engine: FakeEngine, handover: Handover) -> None:
    http = app_of(handover, Heartbeat(engine.resume_generation, interval=1, timeout=1))
    for body in ({}, {"path": "v1"}, {"path": "", "version": 1}, {"path": "v1", "version": -1},
                 {"path": "v1", "version": "1"}, {"path": "v1", "version": 1, "forse": True}):  # fmt: skip
        assert http.post("/rlrun/update_weights", json=body).status_code == 422
    assert engine.calls == []
    answer = http.post("/rlrun/update_weights", json={"path": "v1", "version": 1})
    assert (answer.status_code, answer.json()["version"], answer.json()["changed"]) == (200, 1, True)
    refused = http.post("/rlrun/reload_weights", json={"version": 0})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, 409)
