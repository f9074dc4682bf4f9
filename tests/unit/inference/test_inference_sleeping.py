"""Sleeping engines that share their GPUs: refused requests and the order of waking."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from rlrun.inference.engine_settings import InferenceSettings
from rlrun.inference.weights.handover import Handover, HandoverError, HandoverOptions
from rlrun.inference.weights.sleeping import COMPUTING, DROP_WEIGHTS, Sleeper, SleepGate


class FakeEngine:
    """Engine that records the order of its calls and the parts of its memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory = {"weights", "kv_cache"}
        self.label, self.fails, self.hangs = "default", "", ""
        self.errored = self.given_up = False

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError(f"{name} broke")
        if name == self.hangs:
            await asyncio.Event().wait()

    async def sleep(self, level: int = 1, mode: Any = "") -> None:
        assert (level, mode) == (DROP_WEIGHTS, "abort")
        await self._called("sleep")
        self.memory = set()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags is not None
        await self._called(f"wake {tags[0]}")
        self.memory |= set(tags)
        return True

    async def pause_generation(self, *, mode: Any = "", clear_cache: bool = True) -> None:
        await self._called("pause")

    async def resume_generation(self) -> None:
        assert self.memory == {"weights", "kv_cache"}
        await self._called("resume")

    async def update_weight_version(self, new_version: str) -> None:
        self.label = new_version

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert "weights" in self.memory, "weights need memory"
        await self._called("load")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def handover(engine: FakeEngine, tmp_path: Path) -> Handover:
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        save_file({"a": np.zeros(1)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "COMPLETE").touch()

    def on_broken() -> None:
        engine.given_up = True

    sleeper = Sleeper(engine, level=DROP_WEIGHTS)
    options = HandoverOptions(
        base_model="base", weights_dir=str(tmp_path), expected=None, timeout=0.2, on_broken=on_broken
    )
    return Handover(engine, options, sleeper=sleeper)


async def test_engine_wakes_with_new_weights_before_cache(engine: FakeEngine, handover: Handover) -> None:
    await handover.sleep()
    assert (handover.asleep, engine.memory) == (True, set())
    await handover.update("v1", 1)
    assert engine.calls == ["sleep", "pause", "wake weights", "load", "wake kv_cache", "resume"]
    assert (handover.asleep, engine.label) == (False, "1")
    engine.calls.clear()
    await handover.update("v2", 2)
    assert engine.calls == ["pause", "load", "resume"], "one that is awake is not woken"


async def test_update_to_current_version_wakes_engine(engine: FakeEngine, handover: Handover) -> None:
    """A new orchestrator finds the engine asleep and sends the version that it served before."""
    await handover.update("v1", 1)
    await handover.sleep()
    assert (await handover.update("v1", 1)).changed is True
    assert (handover.asleep, engine.memory) == (False, {"weights", "kv_cache"})


async def test_concurrent_sleep_calls_run_once_after_update(engine: FakeEngine, handover: Handover) -> None:
    updating = asyncio.create_task(handover.update("v1", 1))
    await asyncio.gather(handover.sleep(), handover.sleep(), updating)
    assert engine.calls.count("sleep") == 1
    assert engine.calls.index("sleep") > engine.calls.index("resume"), "not in the middle of an update"


async def test_refused_folder_leaves_engine_asleep(engine: FakeEngine, handover: Handover) -> None:
    await handover.sleep()
    with pytest.raises(HandoverError) as refused:
        await handover.update("nowhere", 1)
    assert refused.value.status == 400
    assert handover.asleep
    assert engine.calls == ["sleep"]


@pytest.mark.parametrize("failing", ["sleep", "wake weights", "load", "wake kv_cache"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_failed_sleep_or_wake_stops_server(
    engine: FakeEngine, handover: Handover, failing: str, how: str
) -> None:
    setattr(engine, how, failing)

    async def one_turn() -> None:
        await handover.sleep()
        await handover.update("v1", 1)

    with pytest.raises(HandoverError) as failed:
        await one_turn()
    assert failed.value.status == 500
    assert engine.given_up
    assert handover.asleep, "nothing is computed in the time that is left"


async def test_engine_with_own_gpus_refuses_sleep(engine: FakeEngine, tmp_path: Path) -> None:
    options = HandoverOptions(
        base_model="", weights_dir=str(tmp_path), expected=None, timeout=1, on_broken=lambda: None
    )
    handover = Handover(engine, options)
    with pytest.raises(HandoverError, match=r"set placement\.colocate"):
        await handover.sleep()
    assert engine.calls == []


def test_sleep_gate_refuses_only_computing_requests() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("computed")(scope, receive, send)

    asleep = True
    http = TestClient(SleepGate(app, lambda: asleep))  # type: ignore[arg-type]
    for path in COMPUTING:
        answer = http.post(path, json={})
        assert (answer.status_code, "the trainer uses its GPUs" in answer.text) == (503, True)
    assert http.post("/rlrun/update_weights", json={}).status_code == 200
    assert http.get("/health").status_code == 200
    asleep = False
    assert {http.post(path, json={}).status_code for path in COMPUTING} == {200}


@pytest.mark.parametrize(("device", "colocated"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_only_colocated_gpu_engine_enables_sleep(device: Any, colocated: bool) -> None:
    from rlrun.inference.engine_settings import vllm_arguments, vllm_environment

    settings = InferenceSettings(
        model_path="m", served_model_name="m", weights_dir="w", api_key="k" * 8, device=device, colocated=colocated
    )
    assert ("--enable-sleep-mode" in vllm_arguments(settings)) is (device == "cuda" and colocated)
    assert ("PYTORCH_ALLOC_CONF" in vllm_environment(settings)) is colocated
