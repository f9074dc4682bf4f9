"""Adapters on a real engine: the trainer's log-probs, one version per request, separate caches and no leftovers."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlrun.config.models.language_models import LoRAConfig
from rlrun.inference.client.engine_client import Completion, EngineClient, EngineError
from rlrun.trainer.modeling import lora
from tests.support.programs import wait_for, wait_for_async
from tests.support.waiting import UNREACHED_SECONDS

from .conftest import API_KEY, Server, group_members, random_model, sampled_logprobs

CONFIG = LoRAConfig(rank=6, alpha=12)
PROMPT = [1, 9, 17, 25, 33, 41]
IN_FLIGHT_TOKENS = 400
LONG_PROMPT = [4 + (7 * i) % 50 for i in range(400)]
"""Three times the cache block of 128 tokens."""


@pytest.fixture(scope="module")
def adapter_server(launch: Callable[..., Server]) -> Iterator[Server]:
    """Server whose end is a test too: SIGKILL while it serves, and no remaining process."""
    running = launch(max_lora_rank=CONFIG.rank, colocated=True)
    wait_for(running.serving, "the server answers")
    yield running
    group = running.process.pid
    assert any("VLLM" in name for name in group_members(group))
    assert running.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not group_members(group), "all processes of the server are gone")


@pytest.fixture
async def client(adapter_server: Server) -> AsyncIterator[EngineClient]:
    async with EngineClient(
        adapter_server.url, API_KEY, generate_timeout=UNREACHED_SECONDS, update_timeout=UNREACHED_SECONDS
    ) as connected:
        yield connected


def adapted_model(seed: int, config: LoRAConfig = CONFIG) -> Any:
    """Build the server's base model with adapters that disagree with it about every token."""
    model = random_model(0)
    lora.inject_adapters(model, config)
    lora.initialize_adapters(model, seed)
    torch.manual_seed(seed)
    for layer in lora.layers_with_adapter(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.2)
    return model.eval()


def publish(server: Server, model: Any, name: str, config: LoRAConfig = CONFIG) -> Path:
    folder = server.root / "weights" / name
    folder.mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in lora.adapter_tensors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(lora.adapter_config(model, config, "base")))
    (folder / "COMPLETE").touch()
    return folder


async def hand_over(server: Server, client: EngineClient, seed: int) -> tuple[int, Any]:
    version, model = next(server.versions), adapted_model(seed)
    seconds = await client.update_weights(str(publish(server, model, f"v{version}")), version)
    assert seconds["total"] < 5
    return version, model


async def sample(client: EngineClient, prompt: list[int], version: int | None, **options: Any) -> list[Completion]:
    defaults = {"n": 1, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": []}
    salt = None if version is None else str(version)
    return await client.generate(prompt, cache_salt=salt, parameters={"ignore_eos": True}, **(defaults | options))


def deviation(model: Any, prompt: list[int], completion: Completion, temperature: float = 1.0) -> float:
    """Return the largest difference from the trainer's log-probs."""
    reference = sampled_logprobs(model, prompt, completion.token_ids, temperature)
    return float((reference - torch.tensor(completion.logprobs)).abs().max())


async def test_engine_samples_from_the_trained_adapter(adapter_server: Server, client: EngineClient) -> None:
    for seed in (1, 2):
        await client.sleep()
        version, model = await hand_over(adapter_server, client, seed)
        assert (await client.ready()).weight_version == version
        completions = await sample(client, PROMPT, version, n=8, max_tokens=48, temperature=0.7)
        reference = torch.cat([sampled_logprobs(model, PROMPT, c.token_ids, 0.7) for c in completions])
        log_ratio = reference - torch.tensor([x for c in completions for x in c.logprobs])
        assert (log_ratio.exp() - 1 - log_ratio).mean() <= 1e-3
        assert log_ratio.abs().max() < 1e-3
        assert {v for c in completions for v in c.versions} == {version}
        assert deviation(adapted_model(seed + 1), PROMPT, completions[0], 0.7) > 0.05


async def test_base_model_is_not_a_version(adapter_server: Server, client: EngineClient) -> None:
    with pytest.raises(EngineError, match="unknown version"):
        await sample(client, PROMPT, None)
    with pytest.raises(EngineError, match="only adapters") as refused:
        await client.reload_weights(next(adapter_server.versions))
    assert refused.value.status == 400


async def test_request_keeps_its_adapter_during_updates(adapter_server: Server, client: EngineClient) -> None:
    first, old = await hand_over(adapter_server, client, seed=3)
    generation = asyncio.create_task(sample(client, PROMPT, first, n=2, max_tokens=IN_FLIGHT_TOKENS))

    async def runs() -> bool:
        assert not generation.done()
        return (await client.metrics()).running > 0

    await wait_for_async(runs)
    for seed in (4, 5, 6):
        version, new = await hand_over(adapter_server, client, seed)
        (completion,) = await sample(client, PROMPT, version)
        assert list(completion.versions) == [version] * 16
        assert deviation(new, PROMPT, completion) < 1e-3
    assert not generation.done(), "all of them were in one batch"
    for completion in await generation:
        assert list(completion.versions) == [first] * IN_FLIGHT_TOKENS
        assert deviation(old, PROMPT, completion) < 1e-3


async def test_cached_prefix_belongs_to_one_adapter(adapter_server: Server, client: EngineClient) -> None:
    old_version, old = await hand_over(adapter_server, client, seed=7)
    await sample(client, LONG_PROMPT, old_version)
    new_version, new = await hand_over(adapter_server, client, seed=8)
    (fresh,) = await sample(client, LONG_PROMPT, new_version)
    assert deviation(new, LONG_PROMPT, fresh) < 1e-3
    (still,) = await sample(client, LONG_PROMPT, old_version)
    assert list(still.versions) == [old_version] * 16
    assert deviation(old, LONG_PROMPT, still) < 1e-3
    folder = publish(adapter_server, adapted_model(9), "of-another-attempt")
    await client.update_weights(str(folder), new_version, force=True)
    (replaced,) = await sample(client, LONG_PROMPT, new_version)
    assert deviation(adapted_model(9), LONG_PROMPT, replaced) < 1e-3


async def test_unused_adapters_are_unloaded(adapter_server: Server, client: EngineClient) -> None:
    versions = [(await hand_over(adapter_server, client, seed))[0] for seed in (10, 11, 12, 13)]
    served = await client._request_json("GET", "/v1/models", 5)
    names = [card["id"] for card in served["data"]]
    assert names == ["tiny", *(f"tiny-v{version}" for version in versions[-3:])], (
        "a request may be on its way to the one before"
    )
    with pytest.raises(EngineError, match=r"no longer holds tiny-v") as gone:
        await sample(client, PROMPT, versions[0])
    assert gone.value.status is None, "the replica is to get weights again; the rollout is not to blame"


async def test_invalid_adapter_changes_nothing(adapter_server: Server, client: EngineClient) -> None:
    version, model = await hand_over(adapter_server, client, seed=15)
    wide = LoRAConfig(rank=12, alpha=12)
    other = publish(adapter_server, adapted_model(16), "of-another-model")
    tensors = {f"base_model.model.tower.{part}.weight": torch.zeros(6, 6) for part in ("lora_A", "lora_B")}
    save_file(tensors, other / "adapter_model.safetensors")
    half = publish(adapter_server, adapted_model(16), "half")
    whole = lora.adapter_tensors(adapted_model(16))
    whole.pop(next(iter(whole)))
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in whole.items()}, half / "adapter_model.safetensors"
    )
    for folder, message in (
        (publish(adapter_server, adapted_model(16, wide), "wide", wide), "rank 12 is above 6"),
        (adapter_server.publish(random_model(16), "whole-weights"), "is not an adapter"),
        (other, "changes tower.weight, which the served model does not have"),
        (half, r"lora_A.weight has shape None"),
    ):
        with pytest.raises(EngineError, match=message) as refused:
            await client.update_weights(str(folder), next(adapter_server.versions))
        assert refused.value.status == 400
    assert (await client.ready()).weight_version == version
    (completion,) = await sample(client, PROMPT, version)
    assert deviation(model, PROMPT, completion) < 1e-3
