"""Orchestrator of a guest run: its wait for a slot, and the reason if it cannot continue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import API_KEY, eventually, make_config

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.trainer import shared_trainer as module
from rlrun.orchestrator.trainer.shared_trainer import Connection
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import SlotAnswer, SlotRequest
from rlrun.protocol.messages.endpoints import calling_guest, guest_proof, key_digest
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.run_channel import Channel


def open_channel(tmp_path: Path) -> Channel:
    return Channel.start_server(
        attempt=7, api_key=API_KEY, host="127.0.0.1", port=0, batch_path=lambda step: tmp_path / "host" / str(step)
    )


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Channel]:
    channel = open_channel(tmp_path)
    yield channel
    await asyncio.to_thread(channel.close)


OWN_KEY = "the-guests-own-key"
PROOF = guest_proof(API_KEY, "guest", key_digest(OWN_KEY))


def guest_config(tmp_path: Path, tokenizer: Path, host: Channel) -> OrchestratorConfig:
    config = make_config(tmp_path / "guest", tokenizer)
    return config.model_copy(
        update={"name": "guest", "shared_with": "host", "trainer_url": f"http://127.0.0.1:{host.port}"}
    )


def answer(tmp_path: Path, state: Any, **about: Any) -> None:
    shared_trainer_files.write_answer(
        RunPaths(tmp_path / "host"), SlotAnswer(run="guest", attempt=2, state=state, **about)
    )


async def test_guest_waits_for_its_slot_and_releases_it(tmp_path: Path, tokenizer_folder: Path, host: Channel) -> None:
    connection = Connection(guest_config(tmp_path, tokenizer_folder, host), OWN_KEY, attempt=2)
    paths = RunPaths(tmp_path / "host")
    async with contextlib.AsyncExitStack() as stack:
        entering = asyncio.ensure_future(stack.enter_async_context(connection))
        await eventually(lambda: bool(shared_trainer_files.read_requests(paths)))
        assert shared_trainer_files.read_requests(paths) == [
            SlotRequest(run="guest", attempt=2, folder=str(tmp_path / "guest"), key_digest=key_digest(OWN_KEY))
        ]
        answer(tmp_path, "Waiting", reason="all slots are taken: host, other")
        await eventually(lambda: "all slots" in connection.waiting)
        assert connection.waiting == "a slot in the trainer of host: all slots are taken: host, other"
        mine = host.open_guest_channel("guest", attempt=2, batch_path=lambda step: tmp_path / "guest" / str(step))
        mine.accept_batches(4)
        mine.phase("waiting_for_batch")
        assert connection.api_key == OWN_KEY
        answer(tmp_path, "Joined", slot=1, proof=PROOF)
        client = await entering
        assert calling_guest([f"Bearer {connection.api_key}"], API_KEY) == "guest", "the engines take it too"
        assert client.state is not None
        assert (client.state.attempt, client.state.base_step) == (2, 4)
        await client.batch_ready(5, str(tmp_path / "guest" / "5"))
        assert mine.batches.get_nowait().step == 5
        assert host.batches.empty()

        mine.close()
        answer(tmp_path, "Failed", reason="the batch is refused", exit_code=exit_codes.DATA)
        with pytest.raises(
            RoleError, match="the trainer of host has ended the run's attempt: the batch is refused"
        ) as lost:
            await client.batch_ready(6, str(tmp_path / "guest" / "6"))
        assert lost.value.code == exit_codes.DATA
    assert shared_trainer_files.read_requests(paths) == []


async def test_refused_guest_ends_with_the_reason(tmp_path: Path, tokenizer_folder: Path, host: Channel) -> None:
    connection = Connection(guest_config(tmp_path, tokenizer_folder, host), OWN_KEY, attempt=2)
    answer(tmp_path, "Refused", reason="trainer.lora.rank (8) is more", exit_code=exit_codes.CONFIGURATION)
    with pytest.raises(RoleError, match=r"has refused the run: trainer.lora.rank \(8\) is more") as refused:
        await connection.__aenter__()
    assert refused.value.code == exit_codes.CONFIGURATION
    assert shared_trainer_files.read_requests(RunPaths(tmp_path / "host")) == [], "it does not ask any more"


async def test_guest_stops_waiting_when_trainer_is_gone(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_channel(tmp_path)
    monkeypatch.setattr(module, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)
    connection = Connection(guest_config(tmp_path, tokenizer_folder, host), OWN_KEY, attempt=2)
    answer(tmp_path, "Waiting", reason="all slots are taken: host, other")
    entering = asyncio.ensure_future(connection.__aenter__())
    await eventually(lambda: "all slots" in connection.waiting)
    await asyncio.to_thread(host.close)
    with pytest.raises(
        RoleError, match=r"the trainer of host has not answered for .* check that run host exists and runs"
    ):
        await asyncio.wait_for(entering, 60)
    assert shared_trainer_files.read_requests(RunPaths(tmp_path / "host")) == []


async def test_guest_ends_when_its_trainer_reports_an_error(tmp_path: Path, tokenizer_folder: Path) -> None:
    host = open_channel(tmp_path)
    connection = Connection(guest_config(tmp_path, tokenizer_folder, host), OWN_KEY, attempt=2)
    mine = host.open_guest_channel("guest", attempt=2, batch_path=lambda step: tmp_path / "guest" / str(step))
    mine.accept_batches(0)
    mine.phase("waiting_for_batch")
    answer(tmp_path, "Joined", slot=1, proof=PROOF)
    client = await connection.__aenter__()
    await asyncio.to_thread(host.close)
    answer(tmp_path, "Failed", reason="MemoryError: ", exit_code=exit_codes.FAILURE, ended_trainer=True)
    with pytest.raises(RoleError, match="the trainer of host ended, and has ended the run's attempt: MemoryError"):
        await asyncio.wait_for(client.batch_ready(1, str(tmp_path / "guest" / "1")), 60)
    await connection.__aexit__()


async def test_recreated_host_does_not_know_its_guests(
    tmp_path: Path, tokenizer_folder: Path, host: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REASON_SECONDS", 0.1)
    connection = Connection(guest_config(tmp_path, tokenizer_folder, host), OWN_KEY, attempt=2)
    answer(tmp_path, "Joined", slot=1, proof=guest_proof("key-of-the-host-before", "guest", key_digest(OWN_KEY)))
    with pytest.raises(RoleError, match="no longer trains the run: it was restarted") as lost:
        await connection.__aenter__()
    assert lost.value.code == exit_codes.FAILURE, "the next attempt asks again"
