"""Parsers of foreign input: 2,000 hostile inputs each here, `RLRUN_FUZZ=100000` in the long run.

Each input is accepted, or refused with the documented error of its reader; no other error, no output and no growth of memory.
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rlrun.environments.adapters.openai_server import ChatServer
from rlrun.environments.episode import EpisodeError
from rlrun.environments.process.talk import Ready, Talk
from rlrun.environments.process.wire import WireError, encode_document
from rlrun.environments.protocol import Episode, Reply, Score
from rlrun.environments.stage import Played, TaskRef
from rlrun.inference.client.completions import EngineError, EngineMetrics, parse_metrics, parse_packed, parse_stock
from rlrun.orchestrator.journal.frames import (
    _DROPPED,
    _LENGTH,
    _ROLLOUT,
    Content,
    DroppedEntry,
    Head,
    _frame_record,
    encode_head,
    read_segment,
)
from rlrun.orchestrator.journal.frames import encode_entry as encode_entry
from rlrun.protocol.files.attempts import Attempt, Origin, Segment, read_attempt
from rlrun.protocol.files.batch import Batch, BatchError, Sample, read_batch, write_batch
from rlrun.protocol.files.checkpoint_manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    read_manifest,
    verify_files,
    write_manifest,
)
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages import lease_annotations
from rlrun.protocol.messages import trainer_channel as channel_protocol
from rlrun.trainer.channel.run_channel import Channel
from rlrun_operator.status.run_progress import Report, read_lease
from tests.security.hostile import COUNT, as_json, deep, documents, texts

DEEP = [deep(100_000), deep(100_000, '{"a":', "}"), b"[" * 1_000_000]


def is_refused(read: Callable[[], object], error: type[Exception]) -> bool:
    """Return True if the reader raises the expected error; other errors propagate."""
    try:
        read()
    except error as found:
        assert len(str(found)) < 5000  # noqa: PT017
        return True
    return False


# ---- files of a volume


def test_hostile_manifests_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "a").write_bytes(b"abc")
    write_manifest(tmp_path, Manifest(3, 1, 2, "hash", (FileEntry("trainer/a", 3, zlib.crc32(b"abc")),), 1.0))
    file = tmp_path / "manifest.json"
    whole = json.loads(file.read_text())
    verify_files(tmp_path, read_manifest(tmp_path))
    count = 0
    for document in documents([whole]):
        if isinstance(document, dict):  # The writer of a manifest also writes its checksum.
            document.pop("crc32", None)
            document["crc32"] = zlib.crc32(json.dumps(document, sort_keys=True).encode(errors="surrogatepass"))
        file.write_bytes(as_json(document))
        count += is_refused(lambda: verify_files(tmp_path, read_manifest(tmp_path)), ManifestError)
    for data in [*DEEP, *texts([as_json(whole)], count=COUNT // 4)]:
        file.write_bytes(data)
        count += is_refused(lambda: verify_files(tmp_path, read_manifest(tmp_path)), ManifestError)
    assert count > COUNT / 2


@pytest.mark.parametrize("path", ["/dev/zero", "../secret", "trainer/../../secret", "", "link", "a\0b", "."])
def test_manifest_path_outside_of_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    """Sizes and checksums are read from these files: a read of /dev/zero would never end."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"")
    (folder / "link").symlink_to("/dev/zero")
    write_manifest(folder, Manifest(3, 1, 2, "hash", (FileEntry(path, 0, 0),), 1.0))
    with pytest.raises(ManifestError):
        verify_files(folder, read_manifest(folder))


def test_hostile_attempt_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "0001.json"
    seed = asdict(Attempt(2, 4, 1, 2, (Segment(1, 1, 4), Segment(2, 5, None)), "h", 1.0, "uid", Origin("/x", 3, 1)))
    file.write_text(json.dumps(seed))
    assert read_attempt(file).owns(5, 2)
    count = 0
    for data in [*DEEP, *map(as_json, documents([seed])), *texts([as_json(seed)], count=COUNT // 4)]:
        file.write_bytes(data)
        count += is_refused(lambda: read_attempt(file).owns(5, 2), RoleError)
    assert count > COUNT / 3


def a_sample(length: int, group: int) -> Sample:
    return Sample(
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) > 1,
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        advantages=np.zeros(length, np.float32),
        temperature=1.0,
        environment="e",
        task_id="t",
        group=group,
        rollout=0,
        dispatch_version=0,
        reward=0.5,
    )


def test_hostile_batches_are_refused(tmp_path: Path) -> None:
    """A guest's orchestrator writes batches, and the host's trainer reads them."""
    path = tmp_path / "step_00000001.a0001"
    write_batch(path, Batch(1, 1, (a_sample(5, 0), a_sample(7, 1))))
    assert len(read_batch(path).samples) == 2
    seed = json.loads((path / "batch.json").read_text())
    columns = (path / "samples.safetensors").read_bytes()
    count = 0
    for data in [*DEEP, *map(as_json, documents([seed]))]:
        (path / "batch.json").write_bytes(data)
        count += is_refused(lambda: read_batch(path), BatchError)
    (path / "batch.json").write_bytes(as_json(seed))
    for data in texts([columns], count=COUNT // 2):
        (path / "samples.safetensors").write_bytes(data)
        count += is_refused(lambda: read_batch(path), BatchError)
    assert count > COUNT / 3


def test_hostile_journals_are_refused_or_skipped(tmp_path: Path) -> None:
    """Damaged bytes end a segment; complete records with another structure are counted and skipped."""
    file, head = tmp_path / "segment", encode_head(Head("fingerprint"))
    dropped = DroppedEntry(group=1, reason="r", mean_reward=0.5, next_group=2, newest_version=3)
    file.write_bytes(head + encode_entry(dropped))
    assert read_segment(file).entries == [dropped]
    rollout = {
        **{"environment": "e", "task": 1, "dispatch_version": 1, "temperature": 1.0, "lengths": [2], "reward": 1.0},
        **{"metrics": {"x": 1.0}, "messages": [], "texts": ["x"], "finish_reason": "stop", "truncated": False},
        **{"seconds": 1.0, "task_id": "t"},
    }
    payloads = [(_DROPPED, as_json(found)) for found in documents([vars(dropped)])]
    for found in documents([rollout]):
        text = as_json(found)
        payloads.append((_ROLLOUT, _LENGTH.pack(len(text)) + text + bytes(40)))
    payloads += [
        (kind, data) for kind in (_ROLLOUT, _DROPPED) for data in (*DEEP, *texts([as_json(rollout)], count=COUNT // 4))
    ]
    foreign = 0
    for kind, payload in payloads:
        file.write_bytes(head + _frame_record(kind, 1, 0, payload))
        foreign += len(read_segment(file).foreign)
    assert foreign > COUNT
    for data in texts([head + encode_entry(dropped)]):
        file.write_bytes(data)
        assert isinstance(read_segment(file), Content)


# ---- network input


class Passive(Talk):
    """Orchestrator's end of a connection, without a process."""

    def __init__(self) -> None:
        super().__init__("hostile", 1)
        self.lost: list[WireError | None] = []

    async def start(self) -> Ready:
        return Ready("hostile", True, False, 1, 1)

    def end(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def _handle_pong(self, document: Any) -> None: ...

    def _on_connection_lost(self, error: WireError | None) -> None:
        self.lost.append(error)


class Policy:
    """Model that replies at once."""

    async def complete(self, messages: Any, **_: Any) -> Reply:
        return Reply("x", "stop")


MESSAGE = {"role": "user", "content": "x"}


async def test_hostile_environment_messages_are_handled() -> None:
    """Each message is handled, ends one episode, or breaks the connection with a `WireError`."""
    number = 7
    seeds: list[Any] = [
        {
            "op": "complete",
            "rollout": number,
            "call": 1,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 5,
            "stop": [],
            "tools": None,
        },
        {"op": "abandon", "rollout": number, "call": 1},
        {
            "op": "played",
            "rollout": number,
            "task_id": "t",
            "messages": [],
            "replies": 1,
            "info": {},
            "reward": 1.0,
            "metrics": {"x": 1.0},
        },
        {"op": "failed", "rollout": number, "kind": "reward", "task_id": "t", "message": "m"},
        {"op": "ready", "id": "x", "single_turn": True, "compares": False, "train": 1, "eval": 1},
        {"op": "compared", "rollout": number, "rewards": [1.0, 0.5], "metrics": [{}, {"x": 1.0}]},
        {"op": "unusable", "message": "x"},
        {"op": "pong", "number": 1},
    ]
    broken = 0
    lines = [
        *DEEP,
        *map(as_json, documents(seeds)),
        *texts([encode_document(seed) for seed in seeds], count=COUNT // 2),
    ]
    task, group = TaskRef("train", 0), [Played("t", Episode([MESSAGE], 1), Score(0.0))] * 2
    for index, line in enumerate(lines):
        talk, deadlines = Passive(), {"timeout_seconds": 60.0, "reward_seconds": 60.0}
        asked: Any = talk.play(task, Policy(), **deadlines, number=number)  # type: ignore[arg-type]
        if index % 3 == 0:
            asked.close()
            asked = talk.compare(task, group, **deadlines, number=number)
        playing = asyncio.ensure_future(asked)
        await asyncio.sleep(0)
        talk._wire.data_received(line + b"\n")
        broken += talk._wire._broken is not None
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        playing.cancel()
        found = (await asyncio.gather(playing, return_exceptions=True))[0]
        assert not isinstance(found, Exception) or isinstance(found, EpisodeError), found
        talk.ended.cancel()
        if talk._ready.done() and not talk._ready.cancelled():
            talk._ready.exception()
        assert not talk._rollouts
    assert COUNT / 20 < broken < len(lines)


async def test_hostile_trainer_channel_requests_are_handled(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = Channel.start_server(
        attempt=1, api_key="key", host="127.0.0.1", port=0, batch_path=lambda step: Path(f"/r/{step}")
    )
    seeds: list[Any] = [
        {"step": 1, "path": "/r/1"},
        {"reason": "x"},
        {"step": 1, "files": []},
        {"seconds": 1.0, "text": "x"},
    ]
    routes = [
        value
        for name, value in vars(channel_protocol).items()
        if name.isupper() and isinstance(value, str) and value.startswith("/")
    ]
    routes = [route for route in routes if route != channel_protocol.SHUTDOWN]
    assert len(routes) >= 4
    bodies = [
        *DEEP[:2],
        *map(as_json, documents(seeds, count=COUNT // 2)),
        *texts([as_json(seed) for seed in seeds], count=COUNT // 2),
    ]
    statuses: set[int] = set()
    try:
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{channel.port}", headers={"Authorization": "Bearer key"}
        ) as client:
            for number, body in enumerate(bodies):
                async with client.post(routes[number % len(routes)], data=body) as response:
                    statuses.add(response.status)
                    assert response.status < 500, (routes[number % len(routes)], body[:200])
    finally:
        channel.close()
    assert statuses >= {422}
    assert "Traceback" not in caplog.text + capfd.readouterr().err


async def test_hostile_agent_requests_are_handled(caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    seeds: list[Any] = [
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stop": ["a"], "stream": False},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": [tool]},
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "r"},
            ]
        },
    ]
    server = ChatServer()
    await server.start()
    bodies = [*DEEP, *map(as_json, documents(seeds)), *texts([as_json(seed) for seed in seeds], count=COUNT // 4)]
    statuses: set[int] = set()
    try:
        async with server.episode(Policy()) as served, aiohttp.ClientSession() as client:  # type: ignore[arg-type]
            for body in bodies:
                async with client.post(f"{served.endpoint.base_url}/chat/completions", data=body) as response:
                    statuses.add(response.status)
                    document = await response.read()
                    assert response.status in (200, 400), (response.status, body[:300], document[:300])
    finally:
        await server.close()
    assert statuses == {200, 400}
    assert "Traceback" not in caplog.text


def test_hostile_engine_responses_are_refused() -> None:
    token = {"token": "token_id:1", "logprob": -0.1, "top_logprobs": []}
    seed = {
        "request_id": "r",
        "choices": [
            {
                "token_ids": [1, 2],
                "finish_reason": "stop",
                "logprobs": {"content": [token] * 2},
            }
        ],
        "rlrun": {"versions": [{"version": 1, "start": 0}]},
    }
    count = 0
    for data in [*DEEP, *map(as_json, documents([seed]))]:
        count += is_refused(lambda data=data: parse_stock(data, 1), EngineError)  # type: ignore[misc]
    for data in texts([struct.pack("<I", 40) + as_json(seed), as_json(seed)]):
        count += is_refused(lambda data=data: parse_packed(data, 1), EngineError)  # type: ignore[misc]
    assert count > COUNT


def test_hostile_engine_metrics_are_refused() -> None:
    lines = [b'vllm:num_requests_running{a="b"} 1.0', b"vllm:num_requests_waiting 2", b"vllm:kv_cache_usage_perc 0.5"]
    seed = b"\n".join([b"# HELP x", *lines, b"vllm:num_preemptions_total 3", b""])
    assert parse_metrics(seed.decode()).waiting == 2
    for data in texts([seed]):
        if not is_refused(lambda data=data: parse_metrics(data.decode(errors="replace")), EngineError):  # type: ignore[misc]
            assert isinstance(parse_metrics(data.decode(errors="replace")), EngineMetrics)


def test_hostile_lease_annotations_are_tolerated() -> None:
    seed = dict.fromkeys(lease_annotations.ALL, "1")
    for document in documents([seed]):
        lease: Any = {
            "metadata": {
                "annotations": {str(k): str(v) for k, v in document.items()} if isinstance(document, dict) else None
            }
        }
        found = read_lease(lease, 1)
        assert found is None or isinstance(found, Report)
        if found is not None:
            assert len(found.waiting_on or "") <= 1000
            assert all(value is None or value == value for value in (found.reward, found.eta_seconds)), (
                "no nan in a status"
            )
