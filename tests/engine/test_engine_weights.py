"""Weight updates of a real engine: versions, log-probs, caches, refusals and recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlrun.inference.client.engine_client import Completion, EngineClient, EngineError
from tests.support.programs import wait_for_async
from tests.support.waiting import UNREACHED_SECONDS

from .conftest import API_KEY, Server, random_model, sampled_logprobs

PROMPT = [1, 9, 17, 25, 33, 41]
LONG_PROMPT = [4 + (7 * i) % 50 for i in range(400)]
"""Three times the cache block of 128 tokens."""
IN_FLIGHT_TOKENS = 400
"""Length of an answer during an update: its tokens take ten times as long as the update."""


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EngineClient]:
    async with EngineClient(
        server.url, API_KEY, generate_timeout=UNREACHED_SECONDS, update_timeout=UNREACHED_SECONDS
    ) as connected:
        yield connected


async def hand_over(server: Server, client: EngineClient, seed: int) -> tuple[int, Any]:
    """Publish and load the weights of `seed` under the next version."""
    version, model = next(server.versions), random_model(seed)
    await client.update_weights(str(server.publish(model, f"v{version}")), version)
    return version, model


async def sample(
    client: EngineClient, prompt: list[int], salt: str | None, *, seed: int | None = None, **options: Any
) -> list[Completion]:
    defaults = {"n": 1, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": []}
    parameters = {"ignore_eos": True} | ({} if seed is None else {"seed": seed})
    return await client.generate(prompt, cache_salt=salt, parameters=parameters, **(defaults | options))


async def until_running(client: EngineClient, wanted: bool) -> None:
    async def is_wanted() -> bool:
        return ((await client.metrics()).running > 0) is wanted

    await wait_for_async(is_wanted)


def generated(server: Server) -> int:
    """Return the number of tokens that the engine has computed so far."""
    text = server.get("/metrics")[1].decode()
    return sum(
        int(float(line.split()[-1])) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
    )


def deviation(model: Any, prompt: list[int], completion: Completion, temperature: float = 1.0) -> float:
    """Return the largest difference from transformers' log-probs."""
    reference = sampled_logprobs(model, prompt, completion.token_ids, temperature)
    return float((reference - torch.tensor(completion.logprobs)).abs().max())


async def test_readiness_requires_weights_and_reports_the_version(server: Server, client: EngineClient) -> None:
    before = await client.ready()
    if before.weight_version is None:
        assert not before.ready
        assert before.reason == "no weights were loaded since the start"
        with pytest.raises(EngineError, match="the engine sleeps"):
            await sample(client, PROMPT, None)
    version, _ = await hand_over(server, client, seed=1)
    after = await client.ready()
    assert (after.ready, after.reason, after.weight_version) == (True, None, version)
    assert (await client.status())["engine_alive"] is True


async def test_sleeping_engine_wakes_with_new_weights(server: Server, client: EngineClient) -> None:
    """On a CPU no memory is released, but requests, refusals and answers are the same."""
    version, old = await hand_over(server, client, seed=2)
    in_flight = asyncio.create_task(sample(client, PROMPT, str(version), max_tokens=900))
    await until_running(client, True)
    await client.sleep()
    with pytest.raises(EngineError, match="did not finish the request: finish_reason is 'abort'"):
        await in_flight
    assert (await client.status())["asleep"] is True
    assert (await client.ready()).ready, "readiness says whether it may ever be used"
    with pytest.raises(EngineError, match="the engine sleeps because the trainer uses its GPUs") as refused:
        await sample(client, PROMPT, str(version))
    assert refused.value.status == 503
    await client.sleep()
    for seed in (3, 4):
        version, model = await hand_over(server, client, seed)
        assert (await client.status())["asleep"] is False
        (completion,) = await sample(client, PROMPT, str(version))
        assert list(completion.versions) == [version] * len(completion.token_ids)
        assert deviation(model, PROMPT, completion) < 1e-3 < deviation(old, PROMPT, completion)
        await client.sleep()
    await client.reload_weights(next(server.versions))
    assert len(await sample(client, PROMPT, None)) == 1


async def test_logprobs_match_the_sampling_distribution(server: Server, client: EngineClient) -> None:
    version, model = await hand_over(server, client, seed=2)
    temperature = 0.7
    completions = await sample(client, PROMPT, str(version), n=16, max_tokens=48, temperature=temperature)
    reference = torch.cat([sampled_logprobs(model, PROMPT, c.token_ids, temperature) for c in completions])
    log_ratio = reference - torch.tensor([x for c in completions for x in c.logprobs])
    mismatch_kl = (log_ratio.exp() - 1 - log_ratio).mean()
    assert mismatch_kl <= 1e-3
    assert log_ratio.abs().max() < 1e-3
    assert {v for c in completions for v in c.versions} == {version}
    assert all(len(c.token_ids) == 48 and c.finish_reason == "length" for c in completions)


async def test_top_p_and_seed_are_applied(server: Server, client: EngineClient) -> None:
    version, _ = await hand_over(server, client, seed=3)
    first, again = [await sample(client, PROMPT, str(version), temperature=1.3, top_p=0.2, seed=7) for _ in range(2)]
    assert first == again
    # The log-probs are normalized over the nucleus: the likeliest token of a nucleus of 20 % has a large share of it.
    assert max(first[0].logprobs) > -1.0


async def test_packed_answers_equal_vllm_route(server: Server, client: EngineClient) -> None:
    """With a seed both routes sample the same tokens, with the same log-probs and versions."""
    version, _ = await hand_over(server, client, seed=3)
    packed = await sample(client, PROMPT, str(version), n=3, max_tokens=24, seed=11)
    assert client._packs, "the server has no packed route"
    client._packs = False
    stock = await sample(client, PROMPT, str(version), n=3, max_tokens=24, seed=11)
    for one, other in zip(packed, stock, strict=True):
        assert (list(one.token_ids), list(one.versions)) == (list(other.token_ids), list(other.versions))
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=1e-5)
        assert one.finish_reason == other.finish_reason
    client._packs = True
    with pytest.raises(EngineError, match="returned 400") as error:
        await sample(client, [1] * 5000, str(version))
    assert error.value.status == 400
    with pytest.raises(EngineError, match="returned 400"):
        await sample(client, [9_999_999], str(version))


async def test_requests_in_flight_switch_to_new_weights(server: Server, client: EngineClient) -> None:
    old_version, old = await hand_over(server, client, seed=4)
    folder = server.publish(random_model(5), "mid")
    generation = asyncio.create_task(sample(client, PROMPT, str(old_version), n=4, max_tokens=IN_FLIGHT_TOKENS))
    await until_running(client, True)
    new_version = next(server.versions)
    seconds = await client.update_weights(str(folder), new_version)
    assert seconds["total"] > 0
    for completion in await generation:
        switch = completion.versions.index(new_version)
        assert 0 < switch < len(completion.versions) == IN_FLIGHT_TOKENS
        assert list(completion.versions) == [old_version] * switch + [new_version] * (IN_FLIGHT_TOKENS - switch)
        reference = sampled_logprobs(old, PROMPT, completion.token_ids, 1.0)
        difference = (reference - torch.tensor(completion.logprobs)).abs()
        assert difference[:switch].max() < 1e-3, "tokens before the switch are of the old weights"
        assert difference[switch : switch + 8].max() > 0.05, "the next ones are not"


async def test_cached_prefix_of_older_weights_is_not_reused(server: Server, client: EngineClient) -> None:
    old_version, _ = await hand_over(server, client, seed=6)
    await sample(client, LONG_PROMPT, str(old_version))
    new_version, new = await hand_over(server, client, seed=7)
    (stale,) = await sample(client, LONG_PROMPT, str(old_version))
    assert deviation(new, LONG_PROMPT, stale) > 0.05, "without a new salt the old prefix would be used"
    (fresh,) = await sample(client, LONG_PROMPT, str(new_version))
    assert deviation(new, LONG_PROMPT, fresh) < 1e-3


async def test_older_version_drops_the_cache(server: Server, client: EngineClient) -> None:
    version, _ = await hand_over(server, client, seed=8)
    await sample(client, LONG_PROMPT, str(version))
    replacement = random_model(9)
    folder = server.publish(replacement, "other-attempt")
    seconds = await client.update_weights(str(folder), version)
    assert seconds, "the same version from another folder is loaded"
    (completion,) = await sample(client, LONG_PROMPT, str(version))
    assert deviation(replacement, LONG_PROMPT, completion) < 1e-3
    with pytest.raises(
        EngineError, match=f"version {version - 1} is older than the served version {version}"
    ) as refused:
        await client.update_weights(str(folder), version - 1)
    assert refused.value.status == 409
    await client.update_weights(str(folder), version - 1, force=True)
    assert (await client.ready()).weight_version == version - 1


async def test_cache_is_dropped_while_requests_run(server: Server, client: EngineClient) -> None:
    version, _ = await hand_over(server, client, seed=10)
    generation = asyncio.create_task(sample(client, LONG_PROMPT, str(version), n=2, max_tokens=IN_FLIGHT_TOKENS))
    await until_running(client, True)
    replacement = random_model(11)
    await client.update_weights(str(server.publish(replacement, "again")), version)
    (completion,) = await sample(client, LONG_PROMPT, str(version))
    assert deviation(replacement, LONG_PROMPT, completion) < 1e-3
    assert [len(c.token_ids) for c in await generation] == [IN_FLIGHT_TOKENS] * 2


async def test_same_version_is_loaded_once(server: Server, client: EngineClient) -> None:
    version, model = await hand_over(server, client, seed=12)
    assert await client.update_weights(str(server.root / "weights" / f"v{version}"), version) == {}
    base = next(server.versions)
    assert (await client.reload_weights(base))["total"] > 0
    (completion,) = await sample(client, PROMPT, str(base))
    assert list(completion.versions) == [base] * 16
    assert deviation(random_model(0), PROMPT, completion) < 1e-3
    assert deviation(model, PROMPT, completion) > 0.05


async def test_invalid_weight_folder_changes_nothing(server: Server, client: EngineClient, tmp_path: Path) -> None:
    version, model = await hand_over(server, client, seed=13)
    good = server.publish(random_model(14), "good")
    whole = (good / "model.safetensors").read_bytes()
    incomplete = server.publish(random_model(14), "incomplete", complete=False)
    empty = server.publish(random_model(14), "empty")
    (empty / "model.safetensors").unlink()
    cut = server.publish(random_model(14), "cut")
    (cut / "model.safetensors").write_bytes(whole[:-100])
    lacking = server.publish(random_model(14), "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors")
    extra = server.publish(random_model(14), "extra")
    save_file(load_file(good / "model.safetensors") | {"unheard_of": torch.zeros(2)}, extra / "model.safetensors")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "COMPLETE").touch()
    (outside / "model.safetensors").write_bytes(whole)
    link = server.root / "weights" / "link"
    link.symlink_to(outside)
    cases = {
        str(incomplete): "has no COMPLETE file",
        str(empty): "contains no .*safetensors file",
        str(cut): "is not a complete safetensors file",
        str(lacking): "lacks the tensor model.norm.weight",
        str(extra): "contains the tensor unheard_of",
        str(outside): "is not below the weights folder",
        str(link): "is not below the weights folder",
        "../outside": "is not below the weights folder",
        str(server.root / "weights"): "is not below the weights folder",
        str(server.root / "weights" / "never"): "does not exist",
    }
    for path, message in cases.items():
        with pytest.raises(EngineError, match=message) as refused:
            await client.update_weights(path, next(server.versions))
        assert refused.value.status == 400
        assert Path(path).name in str(refused.value)
    (completion,) = await sample(client, PROMPT, str(version))
    assert list(completion.versions) == [version] * 16
    assert deviation(model, PROMPT, completion) < 1e-3
    assert (await client.ready()).ready


async def test_cancelled_task_aborts_its_engine_request(server: Server, client: EngineClient) -> None:
    version, _ = await hand_over(server, client, seed=18)
    before = generated(server)
    generation = asyncio.create_task(sample(client, PROMPT, str(version), n=8, max_tokens=1000))
    await until_running(client, True)
    generation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generation
    await until_running(client, False)
    assert generated(server) - before < 8 * 1000, "what nobody waits for is not computed to its end"
    await hand_over(server, client, seed=19)


async def test_update_continues_without_its_client(server: Server, client: EngineClient) -> None:
    version = next(server.versions)
    folder = server.publish(random_model(20), "orphan")
    update = asyncio.create_task(client.update_weights(str(folder), version))
    async with EngineClient(server.url, API_KEY) as other:

        async def has_begun() -> bool:
            status = await other.status()
            return bool(status["updating"]) or status["weight_version"] == version

        async def has_ended() -> bool:
            return (await other.ready()).weight_version == version

        await wait_for_async(has_begun, poll_seconds=0.0)
        update.cancel()
        await wait_for_async(has_ended)
        assert len(await sample(other, PROMPT, str(version))) == 1
