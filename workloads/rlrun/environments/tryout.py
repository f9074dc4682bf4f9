"""One episode of an environment, played for somebody who looks at it: in a process of its own, as a run plays it, with any model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.environments.chat_server import ChatServer, ServerError, chat_body
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.log import Log
from rlrun.environments.protocol import Message, ModelClient, Reply, Split, Tool
from rlrun.environments.stage import Played, TaskRef
from rlrun.environments.tool_calls import parse_tool_calls
from rlrun.runtime import exit_codes

_PRINTED_LINES = 20
_REPLY_SECONDS = 3600.0
"""Longest wait for a reply; the episode's deadline is the one that counts."""


class TryError(Exception):
    """Error for an episode that cannot be played as asked; names the option and the fix.

    Args:
        message: for people.
        code: exit code of the command.
    """

    def __init__(self, message: str, code: int = exit_codes.USAGE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Deadlines:
    """Most seconds for an episode with its score, and for the score."""

    episode: float = 600.0
    score: float = 60.0


@dataclass(frozen=True)
class Tried:
    """A played episode."""

    played: Played
    sizes: dict[Split, int]
    """Tasks of each split."""
    printed: Sequence[str]
    """The last lines that the environment's code printed."""


class WrittenReplies:
    """A model whose replies somebody writes. Where functions are offered, `<tool_call>` in a reply is a call, as in a run without a parser
    of the engine.

    Args:
        next_reply: gives the next one; None: there is none. Takes the whole conversation.
    """

    def __init__(self, next_reply: Callable[[Sequence[Message]], str | None]) -> None:
        self._next, self._given, self._calls = next_reply, 0, 0

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """See `ModelClient.complete`; lengths are not counted.

        Raises:
            TryError: no reply is left.
        """
        text = await asyncio.to_thread(self._next, messages)
        if text is None:
            raise TryError(
                f"the environment asks for reply {self._given + 1}, and {self._given} were given; add another --reply"
            )
        self._given += 1
        content, found = parse_tool_calls(text) if tools else (text, [])
        if not found:
            return Reply(text)
        # Nine letters and digits, as the strictest chat templates want them.
        calls = [
            {
                "id": f"call{self._calls + number:05d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(found)
        ]
        self._calls += len(calls)
        return Reply(text, tool_calls=tuple(calls), content=content)


class ServedModel:
    """A model behind an OpenAI-style server.

    Args:
        base_url: such as `http://localhost:8000/v1`.
        model: its name there.
        api_key: of the server; empty: none.
        temperature: of the sampling.
        max_tokens: of a reply, where the environment does not say.
    """

    def __init__(self, base_url: str, model: str, *, api_key: str, temperature: float, max_tokens: int) -> None:
        self._url, self._model, self._key = base_url, model, api_key
        self._temperature, self._max_tokens = temperature, max_tokens

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """See `ModelClient.complete`.

        Raises:
            TryError: the server refuses, or answers something else.
        """
        body = chat_body(
            self._model,
            messages,
            max_tokens=max_tokens or self._max_tokens,
            temperature=self._temperature,
            stop=list(stop),
            tools=list(tools or ()),
        )
        server = ChatServer(self._url, api_key=self._key, timeout_seconds=_REPLY_SECONDS)
        try:
            return await server.chat(body)
        except ServerError as error:
            raise TryError(f"--base-url: {error}", exit_codes.UNAVAILABLE) from error
        finally:
            await server.close()


async def play_once(command: Command, task: TaskRef, model: ModelClient, *, deadlines: Deadlines) -> Tried:
    """Load an environment in a process of its own, play one task, and end the process with all that it has started.

    Args:
        command: the environment.
        task: which one to play.
        model: answers.
        deadlines: of the episode.

    Raises:
        StartError: it does not load.
        TryError: it has no such task.
        EpisodeError: the episode gives nothing to train on.
    """
    log = Log(None)
    life = Life(command, Limits(), log)
    try:
        ready = await life.start()
        sizes: dict[Split, int] = {"train": ready.train, "eval": ready.eval}
        if task.index >= sizes[task.split]:
            raise TryError(f"--task {task.index}: split {task.split} has {sizes[task.split]} tasks, counted from 0")
        played = await life.play(task, model, timeout_seconds=deadlines.episode, reward_seconds=deadlines.score)
        return Tried(played, sizes, log.last_lines(_PRINTED_LINES))
    finally:
        life.end()
