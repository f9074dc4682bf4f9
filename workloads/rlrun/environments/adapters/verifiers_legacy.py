"""Adapter `verifiers:<id>` for environments of verifiers 0.1 (`load_environment`), with their own rollout and rubric.

The first part checks an environment at load: whether it is supported, and which of its rows are the same task.

verifiers 0.1 calls its model through the OpenAI client. Here that client is the real one with a replaced transport: each request becomes a
call of RLRun's `ModelClient`, and the reply becomes a chat completion. No connection is opened, and every 0.1 environment that uses chat
completions works. Tools are sent to the model with the request, and calls in the reply are returned in the format of the OpenAI client.

The adapter needs its own virtual environment (`environments[].python`), because the dependencies of verifiers 0.1 and 0.4 conflict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import verifiers as vf
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from rlrun.environments.message_content import content_text
from rlrun.environments.protocol import Episode, Message, ModelClient, Score, Split, Task, VerifiersLoadError

if TYPE_CHECKING:
    import verifiers as vf
    from verifiers.clients import OpenAIChatCompletionsClient


_ELSEWHERE = {
    "SandboxMixin": "needs sandboxes of Prime",
    "SandboxEnv": "needs sandboxes of Prime",
    "CliAgentEnv": "has its own agent program, in a sandbox",
    "RLMEnv": "has its own agent program",
    "BrowserEnv": "needs a browser service",
    "OpenEnvEnv": "needs sandboxes of Prime",
}
"""Classes of verifiers whose rollouts run outside this process, with the reason."""
OWN_SAMPLING = ("max_tokens", "max_completion_tokens", "stop")
"""Sampling arguments of an environment that are applied to its requests."""
_NO_SAMPLING: dict[str, object] = {"n": 1, "extra_body": {}}
"""Sampling arguments that verifiers sets by default."""


def check_environment(env: vf.Environment) -> None:
    """Reject an environment that is not supported. The members of an `EnvGroup` are checked, too.

    Raises:
        VerifiersLoadError: contains the reason, the value and the fix.
    """
    for name, member in _list_members(env, ""):
        try:
            _check_member(member)
        except VerifiersLoadError as error:
            raise VerifiersLoadError(f"{name}{error}") from None


def _list_members(env: vf.Environment, name: str) -> Iterator[tuple[str, vf.Environment]]:
    if not (inner := getattr(env, "env_map", None)):
        yield name, env
        return
    for member_name, member in inner.items():
        yield from _list_members(member, f"{name}{member_name}: ")


def _check_member(env: vf.Environment) -> None:
    name = type(env).__name__
    for base in type(env).__mro__:
        if base.__name__ in _ELSEWHERE and base.__module__.startswith("verifiers."):
            raise VerifiersLoadError(
                f"{name} is a {base.__name__}, which {_ELSEWHERE[base.__name__]}; only environments that run in process are supported"
            )
    if env.message_type != "chat":
        raise VerifiersLoadError(f"message_type is {env.message_type!r}; only 'chat' is supported")
    if not env.score_rollouts:
        raise VerifiersLoadError("score_rollouts is False, so there is nothing to train on: set it to True")
    for key, value in env.sampling_args.items():
        if key not in OWN_SAMPLING and value != _NO_SAMPLING.get(key):
            raise VerifiersLoadError(
                f"sampling_args has {key} {value!r}; remove it and set environments[].sampling ({', '.join(OWN_SAMPLING)} are allowed)"
            )
    rubrics = [*_list_rubrics(env.rubric)]
    groups = [function for rubric in rubrics for function in rubric._get_group_reward_func_names()]
    if groups:
        raise VerifiersLoadError(
            f"its rubric scores whole groups ({', '.join(groups)}), but rollouts are scored one by one: use rewards of single rollouts "
            "(algorithm.advantage compares the rollouts of a group)"
        )
    own = any("score_rollout" in vars(base) for rubric in rubrics for base in _own_bases(type(rubric)))
    if not own and not any(weight for rubric in rubrics for weight in rubric.weights):
        raise VerifiersLoadError("its rubric has no reward with a weight other than 0, so there is nothing to train on")


def _list_rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    if inner := getattr(rubric, "rubrics", None):
        for member in inner:
            yield from _list_rubrics(member)
    else:
        yield rubric


def _own_bases(kind: type) -> Iterator[type]:
    """Classes of a rubric that are not defined by verifiers."""
    return (base for base in kind.__mro__ if not base.__module__.startswith("verifiers."))


def check_row(row: Mapping[str, object]) -> None:
    """Reject a row whose task verifiers cannot read.

    Raises:
        ValueError: contains the reason and the fix.
    """
    task = row.get("task")
    if isinstance(task, str) and not task.lstrip().startswith("{"):
        raise ValueError(
            f"task is {task!r}, but verifiers 0.1.14 does not accept a plain text there: remove or rename the column"
        )


def task_digests(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the digest that determines the split of each task, by the task's id. Tasks with equal digests are in the same split.

    If all rows with a prompt have the same answer, the digest covers only the prompt, so existing splits stay the same. Rows with one
    prompt and several answers are different tasks (in a guessing game only the answer differs). If the answers are also equal, the
    digest covers all columns.
    """
    prompts = {task.id: json.dumps(task.prompt) for task in tasks}
    answers: dict[str, set[str | None]] = {}
    for task in tasks:
        answers.setdefault(prompts[task.id], set()).add(task.answer)
    asked = {
        task.id: prompt if len(answers[prompt := prompts[task.id]]) == 1 else json.dumps([prompt, task.answer])
        for task in tasks
    }
    if len(set(asked.values())) < 2:
        return {task.id: str(task.info["row"]) for task in tasks}
    return {id: hashlib.sha256(text.encode()).hexdigest() for id, text in asked.items()}


def own_sampling(env: vf.Environment, row: Mapping[str, object]) -> dict[str, object]:
    """Return the sampling arguments for a row's requests, from its environment or from its member of an `EnvGroup`."""
    info = row.get("info")
    route = info.get("env_id") if isinstance(info, Mapping) and getattr(env, "env_map", None) else None
    for name in [route] if isinstance(route, str) else route or ():
        env = env.env_map[name]
    return {key: env.sampling_args[key] for key in OWN_SAMPLING if env.sampling_args.get(key) is not None}


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
