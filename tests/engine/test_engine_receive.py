"""Versions from the trainer's memory: a real server, the trainer's real channel and outbox in this process, and gloo
between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from rlrun.inference.client.engine_client import EngineClient, EngineError
from rlrun.protocol.messages.buckets import TensorInfo, plan_buckets
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.weights.weight_transfer import Outbox
from tests.engine.conftest import API_KEY, Server, random_model, sampled_logprobs
from tests.support.waiting import UNREACHED_SECONDS

BUCKET_BYTES = 10_000
PROMPT = [5, 9, 12, 40, 7]
GROUP = "others receive weights from"
"""Log line of the server about a group with a trainer."""


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    box = Outbox(torch.device("cpu"), "127.0.0.1", bucket_bytes=BUCKET_BYTES)
    yield box
    box.close()


@pytest.fixture
def trainer(outbox: Outbox) -> Iterator[str]:
    """Return the address of the trainer's channel."""
    channel = Channel.start_server(attempt=1, api_key=API_KEY, host="127.0.0.1", port=0, batch_path=lambda step: Path())
    channel.offer = outbox.offer
    yield f"http://127.0.0.1:{channel.port}"
    channel.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EngineClient]:
    async with EngineClient(
        server.url, API_KEY, generate_timeout=UNREACHED_SECONDS, update_timeout=UNREACHED_SECONDS
    ) as opened:
        yield opened


def published(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def hold(outbox: Outbox, version: int, tensors: dict[str, torch.Tensor]) -> None:
    infos = [
        TensorInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    buckets = {
        bucket.index: torch.cat([tensors[slot.tensor.name].reshape(-1).view(torch.uint8) for slot in bucket.slots])
        for bucket in plan_buckets(infos, bucket_bytes=BUCKET_BYTES)
    }
    assert len(buckets) > 1
    outbox.hold(version, infos, buckets)


async def assert_serves(client: EngineClient, model: LlamaForCausalLM, version: int) -> None:
    (answer,) = await client.generate(
        PROMPT,
        n=1,
        max_tokens=8,
        temperature=1.0,
        top_p=1.0,
        stop_token_ids=[],
        cache_salt=str(version),
        parameters={"seed": 1},
    )
    assert set(answer.versions) == {version}
    expected = sampled_logprobs(model, PROMPT, answer.token_ids, 1.0)
    assert torch.allclose(expected, torch.tensor(answer.logprobs), atol=1e-4)


async def test_versions_are_received_from_trainer_memory(
    client: EngineClient, outbox: Outbox, trainer: str, server: Server
) -> None:
    first, second = random_model(101), random_model(102)
    old, new = next(server.versions), next(server.versions)
    before = server.log.read_text().count(GROUP)
    hold(outbox, old, published(first))
    assert (await client.receive_weights(trainer, old))["total"] > 0
    await assert_serves(client, first, old)
    assert await client.receive_weights(trainer, old) == {}, "it is there"

    hold(outbox, new, published(second))
    running = asyncio.gather(*(generate_long(client) for _ in range(4)))
    await client.receive_weights(trainer, new)
    await assert_serves(client, second, new)
    assert {version for versions in await running for version in versions} <= {old, new}
    assert server.log.read_text().count(GROUP) == before + 1, "the group is kept"


async def generate_long(client: EngineClient) -> list[int]:
    (answer,) = await client.generate(
        PROMPT,
        n=1,
        max_tokens=256,
        temperature=1.0,
        top_p=1.0,
        stop_token_ids=[],
        cache_salt="1",
        parameters={"ignore_eos": True},
    )
    return list(answer.versions)


async def test_failed_transfer_leaves_the_engine_unchanged(
    client: EngineClient, outbox: Outbox, trainer: str, server: Server
) -> None:
    model = random_model(103)
    good, bad, last = (next(server.versions) for _ in range(3))
    hold(outbox, good, published(model))
    await client.receive_weights(
        trainer, good
    )  # from a trainer other than that of the previous test, so the old group is left
    told = f"version {bad} is not in the trainer's memory; the newest is {good}"
    with pytest.raises(EngineError, match=told) as caught:
        await client.receive_weights(trainer, bad)
    assert caught.value.status == 404
    hold(outbox, bad, published(model) | {"model.norm.weight": torch.zeros(7)})
    with pytest.raises(EngineError, match=r"model\.norm\.weight has shape \(7,\)"):
        await client.receive_weights(trainer, bad)
    with pytest.raises(EngineError, match="does not respond"):
        await client.receive_weights("http://127.0.0.1:9", bad)
    await assert_serves(client, model, good)
    hold(outbox, last, published(model))
    await client.receive_weights(trainer, last)
    await assert_serves(client, model, last)
