"""Engine server over HTTP with the orchestrator's own client."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from stub_run import API_KEY, Program, StubRun, stub_run

from rlrun.inference.client import engine_client as clients
from rlrun.inference.client.engine_client import Completion, EngineClient, EngineError, EngineUnavailableError
from rlrun.protocol.messages.endpoints import (
    BEFORE,
    ENGINE_GENERATE,
    ENGINE_HEALTH,
    ENGINE_METRICS,
    ENGINE_READY,
    HEADER,
    OWN,
    PROTOCOL,
    REFUSED,
    Speaker,
)
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.character_tokenizer import SPECIAL_TOKENS
from tests.support.programs import wait_for_async
from tests.support.stub.model import make_model
from tests.support.stub.policy import Policy, small_files, write_model
from tests.support.stub.replies import Vocabulary
from tests.support.stub.script import PolicyScript

PROMPT = "<bos><user><abcd><assistant>"
LONG_PROMPT = "<bos><user><" + "abcdefghij" * 4 + "><assistant>"


SILENT_SECONDS = 0.5
"""A hanging engine gives no sign; a healthy one responds within milliseconds."""


class Served:
    """A running engine and its client."""

    def __init__(self, run: StubRun) -> None:
        self.run = run
        self.vocabulary: Vocabulary | None = None
        self.process: Program | None = None
        self.client = EngineClient(f"http://127.0.0.1:{run.engine_port}", API_KEY)

    async def connect(self) -> None:
        """Connect with a new client, as for each new server."""
        await self.client.close()
        self.client = EngineClient(self.client.base_url, API_KEY)

    async def start(self, **inference: object) -> None:
        self.run.script(inference={"tokenSeconds": 0} | inference)
        tiny = self.run.config.trainer.model.tiny
        assert tiny is not None
        make_model(self.run.paths.model, tiny, PolicyScript())
        self.vocabulary = Vocabulary.load(self.run.paths.model)
        self.process = self.run.start("inference")
        await self.eventually(self._answers, "the engine answers")

    async def _answers(self) -> bool:
        try:
            await self.client.ready()
        except EngineUnavailableError:
            return False
        return True

    async def runs(self, continuations: int) -> None:
        """Wait until the engine samples this number of continuations."""

        async def so_many() -> bool:
            return (await self.client.metrics()).running == continuations

        await self.eventually(so_many, f"{continuations} continuations run")

    async def eventually(self, check: Callable[[], Awaitable[bool]], what: str) -> None:
        await wait_for_async(check, what, state=self.run.state)

    def publish(self, version: int, accuracy: float) -> str:
        path = self.run.paths.version(version, 1)
        write_model(path, Policy(version, accuracy), small_files(self.run.paths.model), complete=True)
        return str(path)

    def encode(self, prompt: str) -> list[int]:
        assert self.vocabulary is not None
        ids, rest = [], prompt
        while rest:
            token = next((name for name in SPECIAL_TOKENS if rest.startswith(name)), rest[0])
            ids.append(self.vocabulary.ids[token])
            rest = rest[len(token) :]
        return ids

    async def generate(self, prompt: str = PROMPT, *, n: int = 1, max_tokens: int = 64) -> list[Completion]:
        return await self.client.generate(
            self.encode(prompt),
            n=n,
            max_tokens=max_tokens,
            temperature=1.0,
            top_p=1.0,
            stop_token_ids=[2],
            cache_salt="1",
        )

    async def reward(self, n: int = 200) -> float:
        """Return the share of right characters in `n` replies."""
        assert self.vocabulary is not None
        answers = await self.generate(n=n)
        texts = ["".join(self.vocabulary.texts.get(t, "") for t in answer.token_ids) for answer in answers]
        return sum(a == b for text in texts for a, b in zip(text, "dcba", strict=True)) / (4 * n)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    with stub_run(tmp_path, inference={"max_model_len": 128}) as run:
        engine = Served(run)
        yield engine
        await engine.client.close()


async def test_stub_engine_accuracy_follows_its_weights(served: Served) -> None:
    await served.start()
    assert not (await served.client.ready()).ready
    await served.client.update_weights(served.publish(0, 0.2), 0)
    ready = await served.client.ready()
    assert (ready.ready, ready.weight_version) == (True, 0)
    assert await served.reward() == pytest.approx(0.2, abs=0.08)
    await served.client.update_weights(served.publish(1, 0.9), 1)
    assert await served.reward() == pytest.approx(0.9, abs=0.08)
    with pytest.raises(EngineError, match="older than the served version 1"):
        await served.client.update_weights(served.publish(0, 0.2), 0)
    (answer,) = await served.generate()
    assert list(answer.versions) == [1] * 5
    assert answer.finish_reason == "stop"
    metrics = await served.client.metrics()
    assert (metrics.running, metrics.waiting) == (0, 0)


async def test_stub_engine_refuses_weights_of_unknown_protocol(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.start()
    path = served.publish(0, 0.5)
    monkeypatch.setattr(clients, "OWN", Speaker(PROTOCOL + 1, "9.9.9"))
    await served.connect()
    calls = (
        lambda: served.client.update_weights(path, 0),
        lambda: served.client.reload_weights(0),
        lambda: served.client.receive_weights("http://trainer", 0),
        lambda: served.client.sleep(),
    )
    for call in calls:
        with pytest.raises(EngineError, match=r"release 9\.9\.9 \(protocol 2\).*spec\.inference\.image") as refused:
            await call()
        assert refused.value.status == REFUSED
    status = await served.client.status()
    assert (status["weight_version"], status["protocol"], status["release"]) == (None, PROTOCOL, OWN.release)

    assert BEFORE.protocol == PROTOCOL, "releases before there were versions are understood"
    await served.connect()
    served.client._headers.pop(HEADER)
    await served.client.update_weights(path, 0)
    assert (await served.client.status())["weight_version"] == 0


async def test_update_during_reply_is_visible_in_versions(served: Served) -> None:
    await served.start(tokenSeconds=0.03)
    await served.client.update_weights(served.publish(0, 0.5), 0)
    asked = asyncio.create_task(served.generate(LONG_PROMPT, n=4))
    await served.runs(4)
    await served.client.update_weights(served.publish(1, 0.5), 1)
    for answer in await asked:
        versions = list(answer.versions)
        assert len(versions) == 41
        assert versions == sorted(versions)
        assert {*versions} == {0, 1}


async def test_stub_engine_has_access_rules_of_real_server(served: Served) -> None:
    await served.start()
    base = f"http://127.0.0.1:{served.run.engine_port}"
    async with aiohttp.ClientSession(base) as session:
        for path, status in ((ENGINE_HEALTH, 200), (ENGINE_READY, 503), (ENGINE_METRICS, 200), ("/docs", 403)):
            assert (await session.get(path)).status == status, path
        assert (await session.post(ENGINE_GENERATE, json={})).status == 401
        headers = {"Authorization": f"Bearer {API_KEY}"}
        assert (await session.post("/pause", headers=headers)).status == 403
        assert (await session.post(ENGINE_GENERATE, headers=headers, json={"token_ids": []})).status == 422
    for path in (str(served.run.paths.root), "missing"):
        with pytest.raises(EngineError) as caught:
            await served.client.update_weights(path, 1)
        assert caught.value.status == 400
    with pytest.raises(EngineError, match="longest sequence"):
        await served.generate("a" * 128)


async def test_disconnected_client_ends_its_request(served: Served) -> None:
    await served.start(tokenSeconds=3600)
    await served.client.update_weights(served.publish(0, 0.5), 0)
    asked = asyncio.create_task(served.generate(n=3))
    await served.runs(3)
    asked.cancel()
    await served.runs(0)


async def test_failed_update_stops_server_only_once(served: Served) -> None:
    await served.start(faults=[{"version": 1, "action": "fail_update"}])
    await served.client.update_weights(served.publish(0, 0.5), 0)
    path = served.publish(1, 0.5)
    with pytest.raises(EngineError, match="the server stops"):
        await served.client.update_weights(path, 1)
    assert served.process is not None
    assert served.run.wait(served.process) == exit_codes.FAILURE
    await served.connect()
    await served.start(faults=[{"version": 1, "action": "fail_update"}])
    await served.client.update_weights(path, 1)
    assert (await served.client.ready()).weight_version == 1


async def test_scripted_updates_are_slow_and_hanging_engine_is_silent(served: Served) -> None:
    slow, hang = {"version": 1, "action": "slow_update", "seconds": 2}, {"version": 2, "action": "hang"}
    await served.start(updateSeconds=0.1, faults=[slow, hang, {"version": 3, "action": "sigkill"}])
    assert (await served.client.update_weights(served.publish(0, 0.5), 0))["reload"] >= 0.1
    assert (await served.client.update_weights(served.publish(1, 0.5), 1))["reload"] >= 2.1
    await served.client.update_weights(served.publish(2, 0.5), 2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SILENT_SECONDS):
            await served.generate()
    with pytest.raises(EngineUnavailableError):
        await served.client.update_weights(served.publish(3, 0.5), 3)
    assert served.process is not None
    assert served.run.wait(served.process) == -signal.SIGKILL


async def test_stub_engine_stops_like_real_server(served: Served) -> None:
    await served.start()
    assert served.process is not None
    served.process.send_signal(signal.SIGTERM)
    assert served.run.wait(served.process) == exit_codes.OK
    served.run.script(inference={"startSeconds": 3600})
    process = served.run.start("inference", name="starting")
    served.run.until(lambda: _is_listening(served.run.engine_port), "the port is bound while the engine starts")
    process.send_signal(signal.SIGTERM)
    assert served.run.wait(process) == 128 + signal.SIGTERM


def _is_listening(port: int) -> bool:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


async def test_missing_model_of_engine_is_one_line(tmp_path: Path) -> None:
    with stub_run(tmp_path) as run:
        folder = tmp_path / "told"
        assert run.wait(run.start("inference", RLRUN_ERROR_DIR=str(folder))) == exit_codes.DATA
        assert "model" in run.log("inference").read_text()
        assert json.loads((folder / "error.json").read_text())["exit_code"] == exit_codes.DATA
        assert "Traceback" not in run.state()
