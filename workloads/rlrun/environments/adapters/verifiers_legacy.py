"""`verifiers:<id>` with verifiers 0.1: adapter for environments of `load_environment`, with their own rollout and rubric.

verifiers 0.1 calls its model through the OpenAI client. Here that client is the real one with a replaced transport: each request becomes
a call of our `ModelClient`, and the reply becomes a chat completion. No connection is opened, and every 0.1 environment that uses chat
completions works. It needs its own virtual environment (`environments[].python`), because the dependencies of verifiers 0.1 and 0.4
conflict.

Tools are sent to the model with the request, and calls in the reply are returned in the format of the OpenAI client.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import verifiers as vf
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from rlrun.environments.adapters.verifiers_errors import VerifiersLoadError
from rlrun.environments.adapters.verifiers_legacy_playable import (
    check_environment,
    check_row,
    own_sampling,
    task_digests,
)
from rlrun.environments.message_content import content_text
from rlrun.environments.protocol import Episode, Message, ModelClient, Score, Split, Task

if TYPE_CHECKING:
    from verifiers.clients import OpenAIChatCompletionsClient

NAME = "policy"
"""Name of the model in requests."""


_OF_CALLS = ("tool_calls", "tool_call_id", "name")
"""Fields of a message for tool calls and their results."""


class LegacyArgs(BaseModel):
    """Arguments of a `verifiers:` environment of verifiers 0.1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    args: dict[str, object] = Field(default_factory=dict)
    """Arguments of the environment's `load_environment`."""
    limit: int | None = Field(default=None, ge=2)
    """Number of rows to take from its data set."""
    eval_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of its distinct prompts that is held out (at least one), if the environment has no data set for evaluation."""


@dataclass
class _Conversation:
    """State of one rollout, collected from its requests."""

    model: ModelClient
    messages: list[Message] = field(default_factory=list)
    replies: int = 0
    truncated: bool = False
    error: Exception | None = None


_CURRENT: ContextVar[_Conversation] = ContextVar("conversation")
"""Rollout of the current asyncio task. Tasks that verifiers starts inherit the variable, so one client serves all rollouts."""


class _Transport(httpx.AsyncBaseTransport):  # type: ignore[misc]
    """Transport that answers chat completions with the current rollout's model client."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(await request.aread())
        conversation = _CURRENT.get()
        try:
            completion = await _complete_message(conversation, asked, request.url.path)
        except Exception as error:
            conversation.error = error
            raise
        return httpx.Response(200, json=completion, request=request)


async def _complete_message(conversation: _Conversation, asked: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not path.endswith("/chat/completions"):
        raise RuntimeError(f"the environment requested {path}; only chat completions are supported")
    messages = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(asked["messages"])]
    stop = asked.get("stop") or []
    reply = await conversation.model.complete(
        messages,
        max_tokens=asked.get("max_completion_tokens") or asked.get("max_tokens"),
        stop=[stop] if isinstance(stop, str) else stop,
        tools=asked.get("tools") or None,
    )
    conversation.messages = [*messages, reply.message]
    conversation.replies += 1
    conversation.truncated = conversation.truncated or reply.truncated
    finish = "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"
    return {
        "id": f"reply-{conversation.replies}",
        "object": "chat.completion",
        "created": 0,
        "model": NAME,
        "choices": [
            {"index": 0, "finish_reason": finish, "message": reply.message},
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _plain_message(message: Message, where: str) -> Message:
    """Return a message with its content as one text and with its fields for tool calls. verifiers may send a list of parts."""
    calls = {name: message[name] for name in _OF_CALLS if message.get(name)}
    return {"role": message["role"], "content": content_text(message.get("content"), f"{where}.content"), **calls}


class LegacyVerifiersEnvironment:
    """An environment of verifiers 0.1."""

    def __init__(self, id: str, environment_id: str, args: LegacyArgs) -> None:
        self.id = id
        try:
            self._env = vf.load_environment(environment_id, **args.args)
        except Exception as error:
            cause = error.__cause__ or error
            raise VerifiersLoadError(
                f"load_environment({environment_id!r}) raised {type(cause).__name__}: {cause}. "
                "Install its package in the Python that runs the environment (environments[].python)"
            ) from error
        if not hasattr(self._env, "run_rollout"):
            raise VerifiersLoadError(f"verifiers {vf.__version__} has no run_rollout; install 0.1.14")
        check_environment(self._env)
        self._inputs: dict[str, dict[str, object]] = {}
        self._splits = self._divide_rows(args)
        self._client: OpenAIChatCompletionsClient | None = None

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._splits[split]

    async def run(self, task: Task, model: ModelClient) -> Episode:
        if self._client is None:
            self._client = _make_client()
        conversation = _Conversation(model)
        _CURRENT.set(conversation)
        row = self._inputs[task.id]
        output = await self._env.run_rollout(dict(row), self._client, NAME, own_sampling(self._env, row))
        if conversation.error is not None:
            raise conversation.error  # verifiers catches the exception; our caller needs the original one
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        info = {"reward": output["reward"], "metrics": metrics, "truncated": conversation.truncated}
        return Episode(conversation.messages, conversation.replies, info)

    async def score(self, task: Task, episode: Episode) -> Score:
        return Score(episode.info["reward"], dict(episode.info["metrics"]))

    def _divide_rows(self, args: LegacyArgs) -> dict[Split, list[Task]]:
        try:
            rows = self._env.build_dataset()
            self._env.build_eval_dataset()
        except Exception as error:
            raise VerifiersLoadError(f"building its data set raised {type(error).__name__}: {error}") from error
        if rows is None:
            raise VerifiersLoadError("it has no dataset (an eval_dataset is not used for training): give it a dataset")
        train = self._read_tasks("train", rows, args.limit)
        if self._env.eval_dataset is not None:
            return {"train": train, "eval": self._read_tasks("eval", self._env.eval_dataset, args.limit)}
        contents = task_digests(train)
        distinct = sorted(set(contents.values()))
        if len(distinct) < 2:
            raise VerifiersLoadError(
                f"it has {len(distinct)} distinct tasks (rows with another prompt, answer or other column), but training and evaluation "
                "need two: add rows, or give it an eval_dataset"
            )
        held_out = set(distinct[: max(1, min(len(distinct) - 1, round(len(distinct) * args.eval_share)))])
        return {
            "train": [task for task in train if contents[task.id] not in held_out],
            "eval": [task for task in train if contents[task.id] in held_out],
        }

    def _read_tasks(self, split: str, rows: Sequence[Mapping[str, Any]], limit: int | None) -> list[Task]:
        tasks = []
        for index in range(min(len(rows), limit or len(rows))):
            row = {name: value for name, value in rows[index].items() if value is not None}
            row.setdefault("example_id", index)
            try:
                prompt = [_plain_message(message, f"prompt[{place}]") for place, message in enumerate(row["prompt"])]
                check_row(row)
            except ValueError as error:
                raise VerifiersLoadError(f"row {index} of the {split} data: {error}") from None
            task = Task(
                f"{split}-{index}", prompt, answer=_message_text(row.get("answer")), info={"row": _row_digest(row)}
            )
            self._inputs[task.id] = row
            tasks.append(task)
        return tasks


def _make_client() -> OpenAIChatCompletionsClient:
    from verifiers.clients import OpenAIChatCompletionsClient

    http = httpx.AsyncClient(transport=_Transport(), trust_env=False, timeout=None)
    # A retry would append to the tokens of the failed attempt; the orchestrator starts a new episode instead.
    return OpenAIChatCompletionsClient(
        AsyncOpenAI(base_url="http://policy/v1", api_key="none", http_client=http, max_retries=0)
    )


def _row_digest(row: dict[str, object]) -> str:
    """Return a digest of all columns of a row except its id: an environment may define its task in any column."""
    columns = {name: value for name, value in row.items() if name != "example_id"}
    return hashlib.sha256(json.dumps(columns, sort_keys=True, default=str).encode()).hexdigest()


def _message_text(answer: object) -> str | None:
    return None if answer is None else str(answer)
