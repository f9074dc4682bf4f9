"""Sampling parameters of evaluations on the real engine, through the orchestrator's client and the packed route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rlrun.config.models.rollout import CompleteSampling
from rlrun.inference.client.engine_client import Completion, EngineClient
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from tests.support.waiting import UNREACHED_SECONDS

from .conftest import API_KEY, Server, random_model

PROMPT = [1, 9, 17, 25, 33, 41]
TOKENS = 24


class Asking:
    """One version of random weights on the engine, and the same weights in this process."""

    def __init__(self, client: EngineClient, version: int, model: Any) -> None:
        self.client, self.version, self.model = client, version, model

    async def __call__(self, sample: int = 0, **sampling: Any) -> Completion:
        chosen = CompleteSampling(**{"temperature": 1.0, "max_tokens": TOKENS} | sampling)
        (answer,) = await self.client.generate(
            PROMPT,
            n=1,
            max_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            top_p=1.0,
            stop_token_ids=[],
            cache_salt=str(self.version),
            parameters={"ignore_eos": True, **chosen.engine_parameters(chosen.seed_of(sample))},
        )
        assert set(answer.versions) == {self.version}
        return answer

    def likeliest(self) -> list[int]:
        """Return the greedy continuation by transformers."""
        ids = list(PROMPT)
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]


@pytest_asyncio.fixture
async def ask(server: Server) -> AsyncIterator[Asking]:
    version, model = next(server.versions), random_model(9)
    async with EngineClient(
        server.url, API_KEY, generate_timeout=UNREACHED_SECONDS, update_timeout=UNREACHED_SECONDS
    ) as client:
        await client.update_weights(str(server.publish(model, f"v{version}")), version)
        yield Asking(client, version, model)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
async def test_greedy_equivalent_sampling_gives_likeliest_tokens(ask: Asking, sampling: dict[str, Any]) -> None:
    assert list((await ask(**sampling)).token_ids) == ask.likeliest()


async def test_seeded_sample_is_reproducible(ask: Asking) -> None:
    first, again, other = [list((await ask(sample, seed=7)).token_ids) for sample in (0, 0, 1)]
    assert first == again
    assert first != other
    assert list((await ask(0, seed=8)).token_ids) == other


async def test_stop_text_ends_the_answer(ask: Asking, model_folder: Path) -> None:
    whole = list((await ask(temperature=0.0)).token_ids)
    chat = ChatTokens.load(model_folder)
    texts = [chat.decode([token]).strip() for token in whole]
    at = next(i for i in range(4, TOKENS) if len(texts[i]) == 1 and texts[i] not in texts[:i])
    stopped = await ask(temperature=0.0, stop=["no such text", texts[at]])
    assert list(stopped.token_ids) == whole[: at + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == at + 1
    assert stopped.finish_reason == "stop"
    assert (await ask(temperature=0.0, stop=["no such text"])).finish_reason == "length"
    later = await ask(temperature=0.0, stop=[texts[at]], min_tokens=at + 2)
    assert len(later.token_ids) > at + 1


async def test_penalties_reduce_repetition(ask: Asking) -> None:
    plain = ask.likeliest()
    assert len(set(plain)) < len(plain), "nothing is said again here, so that no penalty could show"
    for penalty in ({"repetition_penalty": 10.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert len(set((await ask(temperature=0.0, **penalty)).token_ids)) > len(set(plain))
