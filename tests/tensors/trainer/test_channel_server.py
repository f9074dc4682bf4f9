"""HTTP channel of rank 0: authorization, numbered events, long polls and ordered batches."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.shared_trainer_files import channel_of
from rlrun.protocol.messages import trainer_channel as protocol
from rlrun.protocol.messages.endpoints import TRAINER_READY, guest_key, guest_proof, key_digest
from rlrun.protocol.messages.trainer_channel import TRANSFERS, NotHeldError, TransferOffer, TransferRequest
from rlrun.runtime import exit_codes
from rlrun.trainer.channel import run_channel
from rlrun.trainer.channel.run_channel import Channel

KEY = "secret"


def batch_path(step: int) -> Path:
    return Path(f"/run/rollouts/{step}")


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel.start_server(attempt=3, api_key=KEY, host="127.0.0.1", port=0, batch_path=batch_path)
    yield channel
    channel.close()


@pytest.fixture
async def client(channel: Channel) -> AsyncIterator[aiohttp.ClientSession]:
    url = f"http://127.0.0.1:{channel.port}"
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=timeout) as session:
        yield session


async def events(client: aiohttp.ClientSession, after: int, wait: float = 0) -> list[protocol.Event]:
    async with client.get(protocol.EVENTS, params={"after": after, "wait": wait}) as response:
        assert response.status == 200
        answer = protocol.EventList.model_validate_json(await response.text())
    assert answer.attempt == 3
    return answer.events


async def post_batch(client: aiohttp.ClientSession, step: int, path: Path | None = None) -> tuple[int, str]:
    document = {"step": step, "path": str(path or batch_path(step))}
    async with client.post(protocol.BATCHES, json=document) as response:
        return response.status, await response.text()


async def test_channel_requires_the_api_key_on_every_route(channel: Channel, client: aiohttp.ClientSession) -> None:
    routes = [("GET", protocol.STATE), ("GET", protocol.EVENTS), ("GET", "/"), ("POST", protocol.SHUTDOWN)]
    routes += [("POST", protocol.BATCHES), ("POST", protocol.CHECKPOINTS)]
    for method, route in routes:
        for key in ("Bearer wrong", "", KEY[:-1]):
            async with client.request(method, route, headers={"Authorization": key}) as response:
                assert response.status == 401, (method, route, key)
    assert not channel.shutdown.is_set()


async def test_guest_key_opens_only_its_own_channel(channel: Channel, client: aiohttp.ClientSession) -> None:
    key = {"Authorization": f"Bearer {guest_key('a', 'own', guest_proof(KEY, 'a', key_digest('own')))}"}
    for route, status in (
        (channel_of("a") + protocol.STATE, protocol.GONE),  # open, but the guest has not joined yet
        (channel_of("a-b") + protocol.STATE, 403),
        (channel_of("a"), 403),
        (protocol.STATE, 403),
        (protocol.SHUTDOWN, 403),
        (TRANSFERS, 403),
    ):
        async with client.get(route, headers=key) as response:
            assert response.status == status, route
        async with client.post(route, headers=key) as response:
            assert response.status == status, route
    assert not channel.shutdown.is_set()


async def test_late_reader_receives_all_events(channel: Channel, client: aiohttp.ClientSession) -> None:
    channel.append_event("published", 0, path=Path("/run/weights/v0"))
    channel.append_event("trained", 1, metrics={"loss": 0.5, "grad_norm": math.inf})
    found = await events(client, 0)
    assert [(event.seq, event.kind, event.step) for event in found] == [(1, "published", 0), (2, "trained", 1)]
    assert found[0].path == "/run/weights/v0"
    assert found[1].metrics == {"loss": 0.5}
    assert [event.seq for event in await events(client, 1)] == [2]
    assert await events(client, 2) == []


async def test_read_events_are_dropped_and_unread_events_stay(
    channel: Channel, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_channel, "KEPT_EVENTS", 4)
    seen = 0
    for step in range(40):
        channel.append_event("trained", step)
        if step % 5 == 4:
            found = await events(client, seen)
            assert [event.seq for event in found] == list(range(seen + 1, step + 2))
            seen = found[-1].seq
    assert len(channel._events) <= 13
    for step in range(40, 60):
        channel.append_event("trained", step)
    assert [event.seq for event in await events(client, seen)] == list(range(41, 61))
    async with client.get(f"{protocol.EVENTS}?after=0") as response:
        assert response.status == 409
    async with client.get(protocol.STATE) as response:
        assert (await response.json())["last_event"] == 60


async def test_long_poll_returns_with_the_event(channel: Channel, client: aiohttp.ClientSession) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    waiting = asyncio.create_task(events(client, 0, wait=15))
    async with client.get(protocol.STATE) as response:  # the earlier poll is accepted by now or will see the event
        assert response.status == 200
    threading.Thread(target=channel.append_event, args=("published", 0)).start()
    assert [event.kind for event in await waiting] == ["published"]
    assert loop.time() - began < 10


async def test_long_poll_without_events_times_out(client: aiohttp.ClientSession, channel: Channel) -> None:
    assert await events(client, 0, wait=0.05) == []


async def test_trainer_state_follows_the_loop(channel: Channel, client: aiohttp.ClientSession) -> None:
    channel.accept_batches(4)
    channel.append_event("trained", 5)
    channel.phase("waiting_for_batch")
    async with client.get(protocol.STATE) as response:
        state = protocol.TrainerState.model_validate_json(await response.text())
    assert (state.attempt, state.base_step, state.step, state.phase) == (3, 4, 5, "waiting_for_batch")
    assert state.last_event == 1


async def test_readiness_probe_works_without_a_key(channel: Channel) -> None:
    contact = channel.last_contact
    async with aiohttp.ClientSession(f"http://127.0.0.1:{channel.port}") as probe:
        async with probe.get(TRAINER_READY) as response:
            assert (response.status, (await response.json())["ready"]) == (503, False)
        channel.accept_batches(0)
        async with probe.get(TRAINER_READY) as response:
            assert (response.status, (await response.json())["ready"]) == (200, True)
        async with probe.post(TRAINER_READY) as response:
            assert response.status == 401
    assert channel.last_contact == contact, "a probe is not the orchestrator"


async def test_batches_are_accepted_once_and_in_order(channel: Channel, client: aiohttp.ClientSession) -> None:
    assert (await post_batch(client, 5))[0] == 409
    channel.accept_batches(4)
    assert (await post_batch(client, 5))[0] == 200
    assert (await post_batch(client, 5))[0] == 200  # repeated after a lost response
    status, message = await post_batch(client, 7)
    assert status == 409
    assert "step 6" in message
    assert (await post_batch(client, 4))[0] == 409
    status, message = await post_batch(client, 6, Path("/elsewhere"))
    assert status == 409
    assert str(batch_path(6)) in message
    assert (await post_batch(client, 6))[0] == 200
    assert [channel.batches.get_nowait().step for _ in range(2)] == [5, 6]
    assert channel.batches.empty()


async def test_only_saved_checkpoints_can_be_agreed_on(channel: Channel, client: aiohttp.ClientSession) -> None:
    agreed: list[int] = []
    channel.agreed = agreed.append
    for step, status in ((2, 409), (4, 200)):
        channel.append_event("checkpoint_saved", 4)
        async with client.post(protocol.CHECKPOINTS, json={"step": step}) as response:
            assert response.status == status
    assert agreed == [4]


async def test_version_transfer_requires_a_held_version(channel: Channel, client: aiohttp.ClientSession) -> None:
    body = {"version": 7, "engine": "a"}

    async def ask() -> tuple[int, str]:
        async with client.post(TRANSFERS, json=body) as response:
            return response.status, await response.text()

    status, text = await ask()
    assert status == 409
    assert "weightSync.transport: NCCL" in text

    def offer(request: TransferRequest) -> TransferOffer:
        if request.version != 7:
            raise NotHeldError("the newest is 7")
        about = {"tensors": [], "bucket_bytes": 1, "roots": 1, "checksums": []}
        return TransferOffer(version=7, session=f"of {request.engine}", **about)

    channel.offer = offer
    status, text = await ask()
    assert status == 200
    assert TransferOffer.model_validate_json(text).session == "of a"
    body["version"] = 6
    assert await ask() == (404, '{"error": "the newest is 7"}')


async def test_concurrent_transfer_requests_are_all_answered(channel: Channel, client: aiohttp.ClientSession) -> None:
    engines, about = 40, {"tensors": [], "bucket_bytes": 1, "roots": 1, "checksums": []}
    all_have_asked = threading.Barrier(engines)

    def offer(request: TransferRequest) -> TransferOffer:
        all_have_asked.wait(60)
        return TransferOffer(version=7, session=request.engine, **about)

    async def ask(engine: int) -> str:
        async with client.post(TRANSFERS, json={"version": 7, "engine": str(engine)}) as response:
            return TransferOffer.model_validate_json(await response.text()).session

    channel.offer = offer
    answers = await asyncio.gather(*(ask(engine) for engine in range(engines)))
    assert answers == [str(engine) for engine in range(engines)]


async def test_invalid_channel_body_is_refused(channel: Channel, client: aiohttp.ClientSession) -> None:
    async with client.post(protocol.BATCHES, data="{") as response:
        assert response.status == 422
    async with client.get(protocol.EVENTS, params={"after": "x"}) as response:
        assert response.status == 422


async def test_shutdown_request_sets_the_shutdown_event(channel: Channel, client: aiohttp.ClientSession) -> None:
    async with client.post(protocol.SHUTDOWN) as response:
        assert response.status == 200
    assert channel.shutdown.is_set()


def test_channel_port_in_use_is_refused(channel: Channel) -> None:
    with pytest.raises(RoleError, match=f"127.0.0.1:{channel.port}") as caught:
        Channel.start_server(attempt=1, api_key=KEY, host="127.0.0.1", port=channel.port, batch_path=batch_path)
    assert caught.value.code == exit_codes.UNAVAILABLE
