"""vLLM's chat route with the run's key: the orchestrator's prompt with tools, and the policy's weights."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rlrun.inference.client.engine_client import EngineClient
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from tests.support.waiting import PATIENCE_SECONDS

from .conftest import API_KEY, Server, random_model, sampled_logprobs

MESSAGES = [{"role": "user", "content": "what is 1+2?"}]
TOOL = {"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}


def ask(server: Server, key: str | None, **changes: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "none", "max_tokens": 9}
    body |= {"logprobs": True, "temperature": 1.0, "return_token_ids": True, "ignore_eos": True} | changes
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def test_chat_completion_uses_orchestrator_prompt_and_current_weights(server: Server, model_folder: Path) -> None:
    model, version = random_model(6), next(server.versions)
    async with EngineClient(server.url, API_KEY) as client:
        await client.update_weights(str(server.publish(model, f"v{version}")), version)
    status, answer = ask(server, API_KEY)
    assert status == 200, answer
    chat = ChatTokens.load(model_folder)
    text, opening = chat.opening(MESSAGES, [TOOL])
    prompt = list(opening)
    assert text == "<calc>what is 1+2?"
    assert answer["prompt_token_ids"] == prompt
    (choice,) = answer["choices"]
    sampled = choice["token_ids"]
    assert len(sampled) == 9
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].strip(" ") == chat.decode(sampled).strip(" ")
    said = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert said == pytest.approx(sampled_logprobs(model, prompt, sampled, 1.0).tolist(), abs=1e-4)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_chat_completion_requires_the_run_key(server: Server, key: str | None) -> None:
    assert ask(server, key)[0] == 401
