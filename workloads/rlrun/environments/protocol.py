"""Contract between an environment and its caller.

An environment sees messages, never tokens: it hands the whole conversation to `ModelClient.complete`, and the client
recognises the part it already holds (same prefix, its own replies verbatim) and appends only the new messages' tokens.
So a reply must be put back exactly as it came (`Reply.message`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from rlrun.environments.message_content import content_text

Message = dict[str, Any]
"""One chat message, shaped like OpenAI's: `role` and `content`; a reply may carry `tool_calls`, a tool result `tool_call_id` and `name`."""

Tool = dict[str, Any]
"""A function that the model may call, shaped like OpenAI's: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = get_args(Split)


class UnplayableTaskError(ValueError):
    """Error for a task that can never be played or scored: a fault of its data, which another rollout meets again.

    `run`, `score` and reward functions raise it. The group is given up at once and its task is not played again; the error does not count
    among those that end a run.
    """


@dataclass(frozen=True)
class Task:
    """One problem. Two processes that load the same environment with the same arguments hold equal tasks.

    `id` names the task in journals, traces and metrics: unique within the environment and stable across restarts.
    `prompt` opens the conversation; `answer` is what scoring compares with, when there is one such thing;
    `info` is whatever else scoring needs, JSON values only. Each episode gets a copy of its own.
    """

    id: str
    prompt: list[Message]
    answer: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Reply of the model.

    Attributes:
        text: all of it.
        finish_reason: the engine's word ("stop", "length", ...).
        truncated: whether a token limit cut it off, and not the model ended it.
        tool_calls: the calls in it, if tools were offered, as OpenAI's messages have them.
        content: the text without calls and thoughts, if the reply was taken apart; None: `text`.
        prompt_tokens: tokens that the model read.
        completion_tokens: tokens that it sampled.
        reasoning: the thoughts, if they were kept apart; None: there are none.
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
        """The reply as the conversation must carry it: verbatim."""
        message: Message = {"role": "assistant", "content": self.text if self.content is None else self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message | {"tool_calls": list(self.tool_calls)} if self.tool_calls else message


class ModelClient(Protocol):
    """One episode's access to the policy. Calls of one episode are sequential."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """Sample the next assistant message.

        `messages` is the whole conversation so far. `max_tokens` bounds this reply (None: the run's own bound);
        `stop` are strings that end it; `tools` are described to the model, and its calls are found in its reply (None:
        replies are plain text). Raises whatever the transport raises; environments let that through.
        """
        ...


@dataclass(frozen=True)
class Episode:
    """A finished conversation: `messages` from the prompt to the last message, `replies` of them from the model
    (at least one), and `info` for scoring and for people who read traces, JSON values only."""

    messages: list[Message]
    replies: int
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def last_reply(self) -> str:
        """The text of the last assistant message ("" when there is none)."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return content_text(message.get("content"), "content of the last assistant message")
        return ""


@dataclass(frozen=True)
class Score:
    """Score of an episode: `reward` is trained on; `metrics` are only reported, as `env/<name>`. All finite."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """Environment of `registry.load_environment`. One instance plays many episodes at once: an episode's state is local to `run`."""

    id: str
    """Name of the environment in errors, metrics and journals."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The split's tasks, random access, the same on every call and in every process. Splits share no problem."""
        ...

    async def run(self, task: Task, model: ModelClient) -> Episode:
        """Play one episode."""
        ...

    async def score(self, task: Task, episode: Episode) -> Score:
        """Judge an episode. A pure function of its arguments wherever possible: it may run again after a restart."""
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show the ideal episode, so that a model that knows nothing can be warmed up on it."""

    def demonstration(self, task: Task) -> list[Message]:
        """Messages that follow the prompt in an ideal episode: assistant messages and the environment's answers between."""
        ...


@runtime_checkable
class TellsTurns(Protocol):
    """An environment that knows whether its episodes have one turn; of one that does not say, any number is expected."""

    @property
    def single_turn(self) -> bool:
        """True if every episode asks the model once, and with the task's prompt as it is."""
        ...


@runtime_checkable
class ComparesGroups(Protocol):
    """An environment that pays for what only the episodes of one group together show, such as the better of two replies."""

    @property
    def compares(self) -> bool:
        """True if `compare` gives the scores that count; what `score` gave is a part of them."""
        ...

    async def compare(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Score]) -> Sequence[Score]:
        """Judge all episodes of one group, when the last of them has been scored.

        Args:
            task: of the group.
            episodes: `messages` and `replies`; `info` is empty.
            scores: what `score` gave, one for each episode.

        Returns:
            The scores that count, in the order of the episodes. It may run again after a restart.
        """
        ...


@runtime_checkable
class ReportsNotices(Protocol):
    """An environment that found something in its data which a person should read once."""

    @property
    def notices(self) -> Sequence[str]:
        """One sentence each, such as columns that nothing reads and rows that are left out."""
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
