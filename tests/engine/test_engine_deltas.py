"""Versions as differences from the previous one in a real server: from the trainer's memory over gloo, and from the
volume.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from rlrun.inference.client.engine_client import EngineClient, EngineError
from rlrun.protocol.files.paths import COMPLETE
from rlrun.protocol.messages.buckets import MANIFEST, DeltaFiles, TensorInfo, plan_buckets, root_file, version_checksum
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.weights.delta_writer import Part, compare_buckets
from rlrun.trainer.weights.weight_transfer import Outbox
from tests.engine.conftest import API_KEY, Server, random_model
from tests.engine.test_engine_receive import BUCKET_BYTES, assert_serves, generate_long, hold, published
from tests.support.waiting import UNREACHED_SECONDS


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    box = Outbox(torch.device("cpu"), "127.0.0.1", bucket_bytes=BUCKET_BYTES, differs=True)
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


def step(model: LlamaForCausalLM, seed: int) -> None:
    """Change one element in a hundred, enough to affect the answers."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand(parameter.shape, generator=random) < 0.01] += 0.5


async def test_differences_are_received_from_trainer_memory(
    client: EngineClient, outbox: Outbox, trainer: str, server: Server
) -> None:
    model = random_model(111)
    for index in range(3):
        if index:
            step(model, index)
        version = next(server.versions)
        hold(outbox, version, published(model))
        running = asyncio.gather(*(generate_long(client) for _ in range(2))) if index else None
        await client.receive_weights(trainer, version)
        await assert_serves(client, model, version)
        if running is not None:
            assert outbox.handed is not None
            assert outbox.handed[0] < 0.2 * outbox.handed[1]
            assert {found for versions in await running for found in versions} <= {version - 1, version}


class Volume:
    """Published folders, written like one rank writes them."""

    def __init__(self, root: Path, model: LlamaForCausalLM) -> None:
        self.root = root
        self.tensors = [
            TensorInfo(name=name, dtype="float32", shape=list(tensor.shape))
            for name, tensor in published(model).items()
        ]
        self.buckets = plan_buckets(self.tensors, bucket_bytes=BUCKET_BYTES)
        self.held = self.bodies(model)

    def bodies(self, model: LlamaForCausalLM) -> dict[int, torch.Tensor]:
        now = published(model)
        return {
            bucket.index: torch.cat([now[slot.tensor.name].reshape(-1).view(torch.uint8) for slot in bucket.slots])
            for bucket in self.buckets
        }

    def write(self, model: LlamaForCausalLM, version: int, *, before: str | None, whole: str | None) -> Path:
        base, now = compare_buckets(self.held, None), self.bodies(model)
        part: Part = compare_buckets(now, self.held)
        folder = self.root / f"d{version:08d}.a0001"
        folder.mkdir()
        (folder / root_file(0)).write_bytes(b"".join(part.travels[bucket.index].tobytes() for bucket in self.buckets))
        about = DeltaFiles(
            version=version,
            tensors=self.tensors,
            bucket_bytes=BUCKET_BYTES,
            roots=1,
            checksums=list(part.checksums.values()),
            sizes=list(part.sizes.values()),
            base=version_checksum(base.checksums.values()),
            before=before,
            whole_base=whole,
            whole=None,
        )
        (folder / MANIFEST).write_text(about.model_dump_json())
        (folder / COMPLETE).touch()
        self.held = now
        return folder


async def test_differences_are_loaded_from_the_volume(client: EngineClient, server: Server) -> None:
    model = random_model(121)
    versions = [next(server.versions) for _ in range(5)]
    whole = server.publish(model, f"v{versions[0]:08d}.a0001")
    volume = Volume(whole.parent, model)
    await client.update_weights(str(whole), versions[0])
    await assert_serves(client, model, versions[0])
    before: Path | None = None
    for version in versions[1:4]:
        step(model, version)
        before = volume.write(
            model,
            version,
            before=None if before is None else before.name,
            whole=whole.name if version == versions[1] else None,
        )
        await client.update_weights(str(before), version)
        await assert_serves(client, model, version)
    good = random_model(121)
    for version in versions[1:4]:
        step(good, version)
    step(model, versions[4])
    assert before is not None
    damaged = volume.write(model, versions[4], before=before.name, whole=None) / root_file(0)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EngineError, match="cannot be built"):
        await client.update_weights(str(damaged.parent), versions[4])
    await assert_serves(client, good, versions[3])
    damaged.write_bytes(content)
    await client.update_weights(str(damaged.parent), versions[4])
    await assert_serves(client, model, versions[4])
