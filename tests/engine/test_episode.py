"""Conversation with tools on a real engine: all training samples contain the engine's tokens and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.config.models.rollout import SamplingConfig
from rlrun.inference.client.engine_client import Completion, EngineClient
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.conversation import Conversation
from rlrun.orchestrator.rollouts.engine_session import Session

from .conftest import API_KEY, Server, random_model, sampled_logprobs

TOOL = {"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}
TEMPERATURE = 0.7


class Watched(EngineClient):
    """Client that records the engine's requests and answers."""

    seen: list[list[int]]

    async def generate(self, token_ids: Sequence[int], **options: Any) -> list[Completion]:
        completions = await super().generate(token_ids, **options)
        self.seen.append([*token_ids, *completions[0].token_ids])
        return completions


async def test_episode_samples_contain_the_engine_computation(server: Server, model_folder: Path) -> None:
    chat = ChatTokens.load(model_folder)
    model, version = random_model(5), next(server.versions)
    async with Watched(server.url, API_KEY) as client:
        client.seen = []
        await client.update_weights(str(server.publish(model, f"v{version}")), version)
        session = Session(
            EnginePool([Replica(server.url, client, version=version)], Signal()),
            SamplingConfig(temperature=TEMPERATURE),
            chat.stop_token_ids,
        )
        conversation = Conversation(session, chat, seq_len=900, max_tokens=20)
        messages: list[Any] = [{"role": "user", "content": "1+2="}]
        for _ in range(2):
            reply = await conversation.complete(messages, tools=[TOOL])
            messages += [reply.message, {"role": "tool", "content": "3"}]
        await conversation.complete([{"role": "user", "content": "what was it?"}], tools=[TOOL])
        await conversation.complete([*messages[:2], {"role": "user", "content": "again"}], tools=[TOOL], max_tokens=5)
    first, other, back = conversation.recorded()
    assert [sample.input_ids.tolist() for sample in (first, other, back)] == client.seen[1:]
    for sample in (first, other, back):
        ids = sample.input_ids.tolist()
        computed = sampled_logprobs(model, ids[:1], ids[1:], TEMPERATURE)[torch.from_numpy(sample.loss_mask[1:])]
        assert sample.logprobs[sample.loss_mask].tolist() == pytest.approx(computed.tolist(), abs=1e-4)
        assert set(sample.versions[sample.loss_mask].tolist()) == {version}
        assert 0 < sample.loss_mask.sum() <= 2 * 20
