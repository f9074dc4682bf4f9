"""Adapters on a recording engine: unique names per load, and no unloading of used adapters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save_file
from starlette.testclient import TestClient

from rlrun.inference.client.completions import Adapter, EngineError, parse_stock
from rlrun.inference.engine_settings import InferenceSettings, SettingsError, vllm_arguments
from rlrun.inference.guard import Guard
from rlrun.inference.http.routes import Control, router
from rlrun.inference.weights import lora_adapters as module
from rlrun.inference.weights.handover import HandoverError, HandoverOptions, Served
from rlrun.inference.weights.lora_adapters import AdapterHandover, AdapterServer
from rlrun.inference.weights.preflight import FolderError, check_adapter
from rlrun.protocol.messages.endpoints import ENGINE_UPDATE_WEIGHTS, guest_key, guest_proof, key_digest

EXPECTED = {"model.q_proj.weight": (3, 5), "lm_head.weight": (7, 5)}
A, B = "base_model.model.model.q_proj.lora_A.weight", "base_model.model.model.q_proj.lora_B.weight"
TENSORS = {A: np.zeros((2, 5)), B: np.zeros((3, 2))}


class FakeEngine:
    """Engine that stores adapters by number."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.fails: str | None = None
        self.hangs = False

    async def add_lora(self, request: tuple[str, int, str]) -> bool:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise RuntimeError(f"Traceback\n  lines\nValueError: {self.fails}")
        self.held[request[1]] = request[0]
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.held.pop(number, None) is not None


def write_adapter(folder: Path, tensors: dict[str, Any] = TENSORS, rank: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "COMPLETE").touch()
    return folder


class Bench:
    """Handover with its engine, the model names of the server, and the requests in flight."""

    def __init__(self, root: Path, *, runs: int = 1, timeout: float = 30) -> None:
        self.root, self.engine = root, FakeEngine()
        self.registry: dict[str, Any] = {}
        self.in_use: set[str] = set()
        self.handover = AdapterHandover(
            self.engine,  # type: ignore[arg-type]
            AdapterServer(
                served_name="run",
                registry=self.registry,
                in_use=lambda: set(self.in_use),
                make_request=lambda name, number, path: (name, number, path),
                max_rank=4,
                runs=runs,
            ),
            HandoverOptions(
                base_model="base",
                weights_dir=str(root),
                expected=EXPECTED,
                timeout=timeout,
                on_broken=lambda: None,
            ),
        )

    async def load(self, version: int, folder: str | None = None, *, force: bool = False) -> Any:
        path = write_adapter(self.root / (folder or f"v{version}"))
        return await self.handover.update(str(path), version, force=force)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_adapter_versions_have_unique_names(bench: Bench) -> None:
    outcome = await bench.load(1)
    assert (outcome.model, outcome.version, outcome.changed) == ("run-v1", 1, True)
    assert bench.handover.served == Served(1, str(bench.root / "v1"), "run-v1")
    assert bench.registry == {"run-v1": ("run-v1", 1, str(bench.root / "v1"))}
    again = await bench.load(1)
    assert (again.model, again.changed) == ("run-v1", False)
    forced = await bench.load(1, force=True)
    assert forced.model == "run-v1-2", "the old one may be in use, and its prefixes are cached"
    assert bench.engine.held == {1: "run-v1", 2: "run-v1-2"}
    with pytest.raises(HandoverError, match="version 0 is older"):
        await bench.load(0)


async def test_adapters_of_running_requests_stay_loaded(bench: Bench) -> None:
    for version in range(1, 4):
        await bench.load(version)
        bench.in_use.add("run-v1")
    await bench.load(4)
    assert sorted(bench.registry) == ["run-v1", "run-v2", "run-v3", "run-v4"]
    await bench.load(5)
    assert sorted(bench.registry) == ["run-v1", "run-v3", "run-v4", "run-v5"]
    bench.in_use.clear()
    await bench.load(6)
    await bench.load(7)
    assert sorted(bench.registry) == ["run-v5", "run-v6", "run-v7"]
    assert sorted(bench.engine.held.values()) == ["run-v5", "run-v6", "run-v7"]


async def test_each_run_has_separate_versions_and_adapters(tmp_path: Path) -> None:
    bench = Bench(tmp_path, runs=2)
    for run in ("host", "guest"):
        (tmp_path / run / "weights").mkdir(parents=True)
    for version in range(1, 5):
        assert (await bench.load(version, f"host/weights/v{version}")).model == f"host-v{version}"
    assert (await bench.load(1, "guest/weights/v1")).model == "guest-v1", "older than the host's, and its newest"
    bench.in_use.add("host-v3")
    for version in range(2, 6):
        await bench.load(version, f"guest/weights/v{version}")
    assert sorted(bench.registry) == ["guest-v3", "guest-v4", "guest-v5", "host-v2", "host-v3", "host-v4"]
    with pytest.raises(HandoverError, match="version 4 is older than the served version 5"):
        await bench.load(4, "guest/weights/v4")
    assert (await bench.load(4, "host/weights/v4")).changed is False


async def test_departed_runs_free_adapter_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOADED_LORAS", 2)
    bench = Bench(tmp_path, runs=2)
    for run in ("a", "b", "c", "d", "e"):
        (tmp_path / run / "weights").mkdir(parents=True)
    for run in ("a", "b", "c", "d"):
        await bench.load(1, f"{run}/weights/v1")
    await bench.load(2, "a/weights/v2")
    assert "a-v1" in bench.registry
    await bench.load(1, "e/weights/v1")
    assert sorted(bench.engine.held.values()) == ["a-v1", "a-v2", "d-v1", "e-v1"], "b and c were quiet for longest"


async def test_adapter_load_fails_while_requests_use_all_slots(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOADED_LORAS", 3)
    for version in range(1, 4):
        bench.in_use.add((await bench.load(version)).model)
    with pytest.raises(HandoverError, match="in flight use 3 adapters") as refused:
        await bench.load(4)
    assert refused.value.status == 503
    assert bench.handover.served is not None
    assert bench.handover.served.version == 3
    bench.in_use.discard("run-v1")
    await bench.load(4)
    assert sorted(bench.registry) == ["run-v2", "run-v3", "run-v4"]


@pytest.mark.parametrize(("hangs", "message"), [(False, "ValueError: it broke"), (True, "no response within 0.2 s")])
async def test_failed_adapter_load_keeps_previous_adapter(tmp_path: Path, hangs: bool, message: str) -> None:
    bench = Bench(tmp_path, timeout=0.2)
    await bench.load(1)
    bench.engine.fails, bench.engine.hangs = "it broke", hangs
    with pytest.raises(HandoverError, match=message) as failed:
        await bench.load(2)
    assert failed.value.status == 500
    assert bench.handover.served == Served(1, str(bench.root / "v1"), "run-v1")
    assert list(bench.registry) == ["run-v1"]
    bench.engine.fails, bench.engine.hangs = None, False
    assert (await bench.load(2)).model == "run-v2"


@pytest.mark.parametrize(
    ("tensors", "rank", "message"),
    [
        (TENSORS, 5, "rank 5 is above 4"),
        ({A: TENSORS[A]}, 2, r"lora_B.weight has shape None, but the served model needs \(3, 2\)"),
        ({**TENSORS, A: np.zeros((2, 4))}, 2, r"lora_A.weight has shape \(2, 4\), but the served model needs \(2, 5\)"),
        ({key.replace("q_proj", "x"): value for key, value in TENSORS.items()}, 2, "changes model.x.weight"),
        ({**TENSORS, "base_model.model.lm_head.weight": np.zeros((7, 5))}, 2, "lm_head.weight is not part"),
    ],
)
def test_invalid_adapter_is_refused_before_load(
    tmp_path: Path, tensors: dict[str, Any], rank: int, message: str
) -> None:
    write_adapter(tmp_path / "v1", tensors, rank)
    with pytest.raises(FolderError, match=message):
        check_adapter("v1", str(tmp_path), EXPECTED, 4)


def test_complete_adapter_passes_check_and_incomplete_one_fails(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "v1")
    assert check_adapter("v1", str(tmp_path), EXPECTED, 4) == folder
    assert check_adapter("v1", str(tmp_path), None, 4) == folder
    (folder / "COMPLETE").unlink()
    with pytest.raises(FolderError, match="COMPLETE"):
        check_adapter("v1", str(tmp_path), EXPECTED, 4)


def settings(**options: Any) -> InferenceSettings:
    return InferenceSettings(model_path="m", served_model_name="run", weights_dir="/w", api_key="12345678", **options)


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (6, 8), (16, 16), (300, 320), (512, 512)])
def test_engine_arguments_contain_lora_rank(rank: int, flag: int) -> None:
    arguments = vllm_arguments(settings(max_lora_rank=rank))
    assert "--enable-lora" in arguments
    assert f"--max-lora-rank={flag}" in arguments
    assert "--enable-lora" not in vllm_arguments(settings())


def test_engine_arguments_reserve_adapters_for_all_runs() -> None:
    for runs, at_once, remembered in ((1, 4, 32), (3, 12, 96)):
        arguments = vllm_arguments(settings(max_lora_rank=8, lora_runs=runs))
        assert f"--max-loras={at_once}" in arguments
        assert f"--max-cpu-loras={remembered}" in arguments


def test_unsupported_lora_rank_is_refused() -> None:
    with pytest.raises(SettingsError, match="maxLoraRank: 513 is not between 1 and 512"):
        settings(max_lora_rank=513)


def test_tokens_of_an_adapter_have_its_version() -> None:
    choice = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "default", "start": 0, "end": 2}],
    }
    text = json.dumps({"model": "run-v7", "choices": [choice]}).encode()
    assert list(parse_stock(text, 1, Adapter("run-v7", 7))[0].versions) == [7, 7]
    with pytest.raises(EngineError, match="run-v7 answered a request for run-v8"):
        parse_stock(text, 1, Adapter("run-v8", 8))
    with pytest.raises(EngineError, match="unknown version"):
        parse_stock(text, 1)


async def test_guest_may_use_only_its_folder_and_adapters(tmp_path: Path) -> None:
    shared = Bench(tmp_path, runs=3)
    for run in ("host", "a", "a-b"):
        (tmp_path / run).mkdir()
        await shared.load(1, f"{run}/v1")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a-b" / "v1")
    handover = shared.handover
    assert handover.is_of(str(tmp_path / "a/v1"), "a")
    for path in ("a-b/v1", "host/v1", "a/../host/v1", "a/link", ".", "a-b"):
        assert not handover.is_of(str(tmp_path / path), "a"), path
    assert not handover.is_of("/etc", "a")
    assert handover.holds_for("a", "a-v1")
    for model in ("a-b-v1", "host-v1", "base", "a-v2", None):
        assert not handover.holds_for("a", model), model
    alone = Bench(tmp_path / "a").handover
    assert not alone.is_of(str(tmp_path / "a/v1"), "a"), "an engine of one run has no guests"


def test_guest_key_loads_only_from_its_own_folder(tmp_path: Path) -> None:
    shared = Bench(tmp_path, runs=3)
    for run in ("a", "a-b"):
        (tmp_path / run).mkdir()
        write_adapter(tmp_path / run / "v1")
    app = FastAPI()
    app.include_router(router)
    app.state.rlrun = Control(shared.handover, None)  # type: ignore[arg-type]
    client = TestClient(Guard(app, "the-key"))  # type: ignore[arg-type]
    key = {"Authorization": f"Bearer {guest_key('a', 'own', guest_proof('the-key', 'a', key_digest('own')))}"}

    def load(path: str) -> tuple[int, str]:
        answer = client.post(ENGINE_UPDATE_WEIGHTS, json={"path": path, "version": 1}, headers=key)
        return answer.status_code, answer.text

    for path in (str(tmp_path / "a-b/v1"), "a-b/v1", "a/../a-b/v1", "/etc", "a\0", "a" * 9999):
        status, text = load(path)
        assert (status, "is outside of the folder of run a" in text) == (403, True), path
    assert shared.registry == {}
    assert load("a/v1")[0] == load(str(tmp_path / "a/v1"))[0] == 200
    assert sorted(shared.registry) == ["a-v1"]
