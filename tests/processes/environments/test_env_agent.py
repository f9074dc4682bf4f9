"""Unmodified OpenAI client programs as agents: requests reach the policy, replies reach the program."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rlrun.environments import AgentEnvironment, EpisodeError, Message, Reply, Score, Task, run_episode, run_program
from rlrun.environments.adapters.openai_api import RequestError, read_request
from rlrun.environments.adapters.openai_server import ChatServer, Endpoint, Served
from tests.support.programs import wait_for_async
from tests.support.waiting import UNREACHED_SECONDS

TOOL = {"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "calc", "arguments": '{"x": 1}'}}


class Model:
    """Model that returns scripted replies in order; functions are called with the messages."""

    def __init__(self, *said: Any) -> None:
        self.said = list(said)
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        self.asked.append((list(messages), options))
        said = self.said.pop(0)
        if callable(said):
            said = await said(messages)
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, Reply) else Reply(said, prompt_tokens=7, completion_tokens=3)


@asynccontextmanager
async def serve_model(model: Model) -> AsyncIterator[tuple[Served, AsyncOpenAI]]:
    server = ChatServer()
    await server.start()
    try:
        async with server.episode(model) as served, client_of(served.endpoint) as client:
            yield served, client
    finally:
        await server.close()


def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


def user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def send_messages(client: AsyncOpenAI, messages: Sequence[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="gpt", messages=list(messages), **options)


async def test_client_conversation_with_tools_reaches_policy() -> None:
    called = Reply("b<tool_call>...", tool_calls=(CALL,), content="b", prompt_tokens=5, completion_tokens=2)
    model = Model(called, "done")
    async with serve_model(model) as (served, client):
        options = {"tools": [TOOL], "temperature": 0.2, "seed": 3, "max_completion_tokens": 9, "stop": "x"}
        first = await send_messages(client, [user_message("a")], **options)
        message = first.choices[0].message
        assert (first.model, first.choices[0].finish_reason, first.usage.total_tokens) == ("gpt", "tool_calls", 7)
        assert message.content == "b"
        assert message.tool_calls[0].model_dump() == CALL
        asked = [
            user_message("a"),
            message,
            {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "2"}]},
        ]
        second = await send_messages(client, asked, tools=[TOOL])
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("done", "stop")
    assert model.asked[0] == ([user_message("a")], {"max_tokens": 9, "stop": ["x"], "tools": [TOOL]})
    # The program must return the policy's own text, so that its tokens are found again.
    result = {"role": "tool", "content": "2", "tool_call_id": "call_0"}
    assert model.asked[1][0] == [user_message("a"), called.message, result]
    assert (served.replies, served.messages[-1]) == (2, {"role": "assistant", "content": "done"})


async def test_streamed_reply_equals_whole_reply() -> None:
    called = Reply("b", tool_calls=(CALL,), content="", prompt_tokens=5, completion_tokens=2)
    async with serve_model(Model(called, Reply("cut", "length", truncated=True, completion_tokens=1))) as (_, client):
        stream = await send_messages(
            client, [user_message("a")], tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.tool_calls[0].function.model_dump() == CALL["function"]
        assert chunks[1].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens == 2
        whole = [chunk async for chunk in await send_messages(client, [user_message("b")], stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in whole) == "cut"
        assert whole[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([], None, "JSON object"),
        ({}, "messages", "at least one"),
        ({"messages": [{"role": "robot"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "parts of type text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]", "calls of functions"),
        ({"messages": [user_message("a")], "n": 2}, "n", "one choice"),
        ({"messages": [user_message("a")], "max_tokens": 0}, "max_tokens", "positive"),
        ({"messages": [user_message("a")], "stop": [1]}, "stop", "text"),
        ({"messages": [user_message("a")], "tools": [{"type": "function"}]}, "tools", "name"),
        ({"messages": [user_message("a")], "tool_choice": "required"}, "tool_choice", "auto or none"),
        (
            {"messages": [user_message("a")], "response_format": {"type": "json_object"}},
            "response_format",
            "in the prompt",
        ),
        ({"messages": [user_message("a")], "logprobs": True}, "logprobs", "recorded"),
        (
            {"messages": [user_message("a")], "continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
            "end with another role than assistant",
        ),
        (
            {"messages": [user_message("a")], "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
            "the run's sampling.chatTemplateArguments",
        ),
    ],
)
def test_unsupported_request_is_refused_with_field_and_fix(body: Any, param: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        read_request(body)
    assert refused.value.document()["error"]["param"] == param


async def test_errors_have_openai_format() -> None:
    model = Model(Reply("", "length", truncated=True, prompt_tokens=99))
    async with serve_model(model) as (served, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await send_messages(client, [user_message("a")], n=2)
        assert (refused.value.param, refused.value.code) == ("n", "unsupported_parameter")
        with pytest.raises(openai.BadRequestError) as refused:
            await send_messages(client, [user_message("a")])
        assert refused.value.code == "context_length_exceeded"
        assert served.overflowed
        with pytest.raises(openai.NotFoundError, match="is not supported"):
            await client.responses.create(model="gpt", input="a")
        assert [model.id async for model in client.models.list()] == ["policy"]
        stranger = AsyncOpenAI(base_url=served.endpoint.base_url.replace("episodes/", "episodes/x"), api_key="x")
        async with stranger:
            with pytest.raises(openai.NotFoundError, match="the episode does not exist"):
                await send_messages(stranger, [user_message("a")])


async def test_concurrent_calls_reach_policy_in_sequence() -> None:
    busy = 0

    async def slow(messages: Sequence[Message]) -> str:
        nonlocal busy
        busy += 1
        assert busy == 1
        for _ in range(20):
            await asyncio.sleep(0)
        busy -= 1
        return str(messages[0]["content"])

    async with serve_model(Model(slow, slow, slow)) as (served, client):
        answers = await asyncio.gather(*(send_messages(client, [user_message(name)]) for name in "abc"))
        assert [answer.choices[0].message.content for answer in answers] == ["a", "b", "c"]
        assert served.replies == 3


async def test_disconnected_program_cancels_its_call() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def wait(_: Sequence[Message]) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return ""

    async with serve_model(Model(wait, "b")) as (_, client):
        asking = asyncio.ensure_future(send_messages(client, [user_message("a")]))
        await asked.wait()
        asking.cancel()
        await wait_for_async(gone.is_set, "the end of the request")
        assert (await send_messages(client, [user_message("a")])).choices[0].message.content == "b"


# ---- environments


class Agent(AgentEnvironment):
    id = "agent"

    def __init__(self, play: Callable[[Task, Endpoint], Awaitable[Any]]) -> None:
        self.play = play

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    async def agent(self, task: Task, endpoint: Endpoint) -> Any:
        return await self.play(task, endpoint)

    async def score(self, task: Task, episode: Any) -> Score:
        return Score(float(episode.info["result"] == task.answer))


TASK = Task("t", [user_message("a")], answer="xy")


async def two_calls(task: Task, endpoint: Endpoint) -> str:
    async with client_of(endpoint) as client:
        first = (await send_messages(client, task.prompt)).choices[0].message
        second = (await send_messages(client, [*task.prompt, first, user_message("b")])).choices[0].message
    return first.content + second.content


async def play_episode(agent: Agent, model: Model, seconds: float = UNREACHED_SECONDS) -> tuple[Any, Score]:
    try:
        return await run_episode(agent, TASK, model, timeout_seconds=seconds)
    finally:
        await agent.close()


async def test_agent_episode_records_messages_and_result() -> None:
    episode, score = await play_episode(Agent(two_calls), Model("x", "y"))
    assert score.reward == 1.0
    assert episode.replies == 2
    assert [message["content"] for message in episode.messages] == ["a", "x", "b", "y"]
    assert episode.info == {"result": "xy", "truncated": False, "agent_error": None}


async def test_agent_stopped_by_full_context_is_scored() -> None:
    episode, score = await play_episode(Agent(two_calls), Model("x", Reply("", "length", truncated=True)))
    assert (episode.replies, score.reward, episode.info["truncated"]) == (1, 0.0, True)
    assert "no room" in episode.info["agent_error"]


async def no_calls(task: Task, endpoint: Endpoint) -> None:
    return None


async def exits(task: Task, endpoint: Endpoint) -> None:
    sys.exit(3)


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [(no_calls, "environment", "without a reply"), (exits, "environment", r"SystemExit\(3\)")],
)
async def test_failing_program_fails_its_episode(program: Any, kind: str, words: str) -> None:
    with pytest.raises(EpisodeError, match=words) as failed:
        await play_episode(Agent(program), Model())
    assert failed.value.kind == kind


async def swallows(task: Task, endpoint: Endpoint) -> str:
    try:
        return await two_calls(task, endpoint)
    except openai.APIError:
        return "xy"


async def test_failing_model_fails_episode_despite_handled_error() -> None:
    model = Model("x", ValueError("engine gone"))
    with pytest.raises(EpisodeError, match="engine gone") as failed:
        await play_episode(Agent(swallows), model)
    assert failed.value.kind == "model"
    assert len(model.asked) == 2  # The OpenAI client has no time to retry.


PROGRAM = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], end="")
if "fail" in sys.argv: sys.exit("it broke")
"""


@pytest.mark.parametrize("failing", [False, True])
async def test_subprocess_program_gets_policy_from_variables(failing: bool) -> None:
    async def program(task: Task, endpoint: Endpoint) -> str:
        command = [sys.executable, "-S", "-c", PROGRAM, *(["fail"] if failing else [])]
        return await run_program(command, endpoint, stdin=task.prompt[0]["content"])

    model = Model("xy")
    if failing:
        with pytest.raises(EpisodeError, match="ended with code 1: it broke"):
            await play_episode(Agent(program), model)
    else:
        assert (await play_episode(Agent(program), model))[1].reward == 1.0
    assert json.dumps(model.asked[0][0]) == json.dumps([user_message("a")])


def is_running(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_cancelled_program_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def program(task: Task, endpoint: Endpoint) -> str:
        return await run_program(
            ["sh", "-c", f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"], endpoint
        )

    playing = asyncio.ensure_future(play_episode(Agent(program), Model()))
    await wait_for_async(pids.exists)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    for pid in map(int, pids.read_text().split()):
        await wait_for_async(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


async def test_deadline_ends_episode_of_waiting_program() -> None:
    async def program(task: Task, endpoint: Endpoint) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EpisodeError) as failed:
        await play_episode(Agent(program), Model(), seconds=0.01)
    assert failed.value.kind == "timeout"
