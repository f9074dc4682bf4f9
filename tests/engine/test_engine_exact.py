"""Equality of the trainer's and the engine's log-probs under equal weights, for every accepted sampling parameter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rlrun.algorithms import mismatch_kl
from rlrun.config.models.rollout import CompleteSampling, SamplingConfig
from rlrun.inference.client.engine_client import EngineClient
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Replica
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens, load_tokenizer
from rlrun.orchestrator.rollouts.conversation import Conversation
from rlrun.orchestrator.rollouts.engine_session import Session
from rlrun.orchestrator.types import Recorded
from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import packed_attention
from tests.support.waiting import UNREACHED_SECONDS

from .conftest import API_KEY, Server, random_model

EXACT = 1e-6
"""Largest mean `mismatch_kl` of equal weights in float32."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'aaa' if enable_thinking else '' }}"
ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "max_tokens": {"max_tokens": 5},
    "seed": {"seed": 7},
    "stop": {"stop": ["e", "7", "no such text"]},
    "chat_template_arguments": {"chat_template_arguments": {"enable_thinking": True}},
    "all": {
        "temperature": 1.4,
        "max_tokens": 30,
        "seed": 3,
        "stop": ["a"],
        "chat_template_arguments": {"enable_thinking": True},
    },
}
REFUSED: dict[str, Any] = {
    "min_tokens": 20,
    "top_p": 0.7,
    "top_k": 8,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
}


class Playing:
    """One version of random weights on the engine, and the same weights in a model of the trainer."""

    def __init__(self, client: EngineClient, url: str, version: int, model: Any, chat: ChatTokens) -> None:
        self.pool = EnginePool([Replica(url, client, version=version)], Signal())
        self.model, self.chat = model, chat

    async def turns(
        self, sampling: SamplingConfig | CompleteSampling, seed: int | None, stops: tuple[int, ...] = ()
    ) -> Recorded:
        """Play a conversation of two turns."""
        chat = self.chat.called_with(sampling.chat_template_arguments)
        session = Session(self.pool, sampling, stops or chat.stop_token_ids, seed=seed)
        talk = Conversation(session, chat, seq_len=900, max_tokens=sampling.max_tokens, stop=sampling.stop)
        said: list[Any] = [{"role": "user", "content": "1+2="}]
        said.append((await talk.complete(said)).message)
        await talk.complete([*said, {"role": "user", "content": "and 3?"}])
        (recorded,) = talk.recorded()
        return recorded

    def mismatch(self, recorded: Recorded, temperature: float) -> float:
        """Return the trainer's mismatch metric of these tokens, computed by its own forward pass over a packed row."""
        zeros = np.zeros(len(recorded.input_ids), np.float32)
        columns = (recorded.input_ids, recorded.loss_mask, recorded.logprobs, recorded.versions, zeros)
        sample = Sample(*columns, temperature, "env", "task", group=0, rollout=0, dispatch_version=0, reward=0.0)
        row = micro_batch([sample, sample], torch.device("cpu"))
        (computed,) = logprobs_without_gradient(self.model, [row])
        return float(mismatch_kl(computed[row.mask], row.inference_logprobs[row.mask]).mean())


@pytest_asyncio.fixture
async def play(server: Server, model_folder: Path) -> AsyncIterator[Playing]:
    packed_attention.register_attention()
    version, model = next(server.versions), random_model(12)
    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template = TEMPLATE
    async with EngineClient(
        server.url, API_KEY, generate_timeout=UNREACHED_SECONDS, update_timeout=UNREACHED_SECONDS
    ) as client:
        await client.update_weights(str(server.publish(model, f"v{version}")), version)
        model.set_attn_implementation(packed_attention.NAME)
        yield Playing(client, server.url, version, model, ChatTokens(tokenizer))


def test_every_sampling_parameter_is_classified() -> None:
    assert {*ACCEPTED, *REFUSED} - {"nothing", "all"} == set(SamplingConfig.model_fields)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("nothing", "all") else pytest.mark.full) for name in ACCEPTED]
)
async def test_accepted_sampling_keeps_log_probs_exact(play: Playing, name: str) -> None:
    sampling = SamplingConfig(**{"max_tokens": 24} | ACCEPTED[name])
    recorded = await play.turns(sampling, sampling.seed)
    assert recorded.loss_mask.sum() >= 4
    assert play.mismatch(recorded, sampling.temperature) <= EXACT
    if sampling.seed is not None:
        again, other = await play.turns(sampling, sampling.seed), await play.turns(sampling, sampling.seed + 1)
        assert np.array_equal(recorded.input_ids, again.input_ids)
        assert not np.array_equal(recorded.input_ids, other.input_ids)


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
async def test_refused_sampling_changes_log_probs(play: Playing, name: str) -> None:
    sampling = CompleteSampling(temperature=1.0, max_tokens=24, **{name: REFUSED[name]})
    stops = tuple(range(40, 54)) if name == "min_tokens" else ()
    assert play.mismatch(await play.turns(sampling, 5, stops), 1.0) > 100 * EXACT
