"""Interface between an environment and its caller.

An environment works with messages, not with tokens. It passes the whole conversation to `ModelClient.complete`; the client detects the part
of it that it already has as tokens (same prefix, with its own replies unchanged) and tokenizes only the new messages. Therefore a reply
must be put back into the conversation unchanged (`Reply.message`).

Optional parts of the interface are separate protocols, such as `Demonstrates`. The adapters for verifiers 0.1 and 0.4 share the error at
the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from rlrun.environments.message_content import content_text

Message = dict[str, Any]
"""One chat message in OpenAI's format: `role` and `content`; a reply may have `tool_calls`, a tool result `tool_call_id` and `name`."""

Tool = dict[str, Any]
"""A function that the model may call, in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = get_args(Split)


class UnplayableTaskError(ValueError):
    """Error for a task that can never be played or scored because its data is faulty, so that another rollout would fail, too.

    `run`, `score` and reward functions raise it. The group is dropped immediately and the task is not played again. The error does not
    count towards the number of errors that ends a run.
    """


@dataclass(frozen=True)
class Task:
    """One problem. Processes that load the same environment with the same arguments must have equal tasks.

    Attributes:
        id: name of the task in journals, traces and metrics; unique within the environment and stable across restarts.
        prompt: first messages of the conversation.
        answer: expected answer, if there is one.
        info: other data for scoring, as JSON values. Each episode gets its own copy.
    """

    id: str
    prompt: list[Message]
    answer: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Reply of the model.

    Attributes:
        text: complete text of the reply.
        finish_reason: reason of the engine ("stop", "length", ...).
        truncated: whether a token limit ended the reply, not the model.
        tool_calls: calls in the reply, if tools were offered, in OpenAI's format.
        content: text without calls and reasoning, if the reply was parsed. None: same as `text`.
        prompt_tokens: number of prompt tokens.
        completion_tokens: number of sampled tokens.
        reasoning: reasoning text, if it was separated from the reply; otherwise None.
    """

    text: str
    finish_reason: str = "stop"
    truncated: bool = False
    tool_calls: tuple[dict[str, Any], ...] = ()
    content: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning: str | None = None

    @property
    def message(self) -> Message:
        """The unchanged reply as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text if self.content is None else self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message | {"tool_calls": list(self.tool_calls)} if self.tool_calls else message


class ModelClient(Protocol):
    """Access of one episode to the policy. Calls of one episode are sequential."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """Sample the next assistant message.

        Args:
            messages: whole conversation so far.
            max_tokens: limit of this reply. None: the run's limit.
            stop: texts that end the reply.
            tools: functions that are described to the model and whose calls are parsed from the reply. None: the reply is plain text.

        Raises:
            Exception: any exception of the transport; environments must not catch it.
        """
        ...


@dataclass(frozen=True)
class Episode:
    """A finished conversation.

    Attributes:
        messages: messages from the prompt to the last one.
        replies: number of messages from the model, at least 1.
        info: data for scoring and for readers of traces, as JSON values.
    """

    messages: list[Message]
    replies: int
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def last_reply(self) -> str:
        """Text of the last assistant message, or "" if there is no such message."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return content_text(message.get("content"), "content of the last assistant message")
        return ""


@dataclass(frozen=True)
class Score:
    """Score of an episode: `reward` is used for training; `metrics` are only reported, as `env/<name>`. All numbers are finite."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """Environment of `registry.load_environment`. One instance plays many episodes at once, so `run` keeps an episode's state local."""

    id: str
    """Name of the environment in errors, metrics and journals."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split, the same on every call and in every process. The splits share no task."""
        ...

    async def run(self, task: Task, model: ModelClient) -> Episode:
        """Play one episode."""
        ...

    async def score(self, task: Task, episode: Episode) -> Score:
        """Score an episode. The result should depend only on the arguments, because scoring may run again after a restart."""
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """Environment with ideal episodes, on which an untrained model can be warmed up."""

    def demonstration(self, task: Task) -> list[Message]:
        """Return the messages after the prompt in an ideal episode: assistant messages and the environment's answers between them."""
        ...


@runtime_checkable
class TellsTurns(Protocol):
    """Environment that states whether its episodes have one turn. Other environments may have any number of turns."""

    @property
    def single_turn(self) -> bool:
        """Whether every episode sends one request to the model, with the unchanged prompt of the task."""
        ...


@runtime_checkable
class ComparesGroups(Protocol):
    """Environment whose rewards need all episodes of a group, such as a preference between two replies."""

    @property
    def compares(self) -> bool:
        """Whether the scores of `compare` replace the ones of `score`."""
        ...

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> Sequence[Score]:
        """Score all episodes of one group, after the last of them has been scored by `score`.

        Args:
            task: task of the group.
            episodes: episodes with `messages` and `replies`; `info` is empty.
            scores: results of `score`, one for each episode.

        Returns:
            Final scores in the order of the episodes. The call may be repeated after a restart.
        """
        ...


@runtime_checkable
class ReportsNotices(Protocol):
    """Environment that reports notices about its data, for a person to read once."""

    @property
    def notices(self) -> Sequence[str]:
        """Notices of one sentence each, such as unused columns and rows that were left out."""
        ...


class SingleTurnEnvironment(ABC):
    """One prompt, one reply. Subclasses define the tasks and a reply's reward."""

    id: str
    single_turn: ClassVar[bool] = True

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]: ...

    @abstractmethod
    async def score(self, task: Task, episode: Episode) -> Score: ...

    async def run(self, task: Task, model: ModelClient) -> Episode:
        reply = await model.complete(task.prompt)
        return Episode(
            messages=[*task.prompt, reply.message],
            replies=1,
            info={"finish_reason": reply.finish_reason, "truncated": reply.truncated},
        )


class VerifiersLoadError(ValueError):
    """Error for a verifiers environment that is not supported. The message contains the reason."""
