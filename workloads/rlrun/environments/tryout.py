"""Play one episode of an environment for inspection, in its own process as in a run, with any model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.environments.chat_server import ChatServer, ServerError, chat_body
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.protocol import Message, ModelClient, Reply, Split, Tool
from rlrun.environments.stage import Played, TaskRef
from rlrun.environments.tool_calls import parse_tool_calls
from rlrun.runtime import exit_codes

_PRINTED_LINES = 20
_REPLY_SECONDS = 3600.0
"""Longest wait for a reply. In practice the deadline of the episode ends the wait earlier."""


class TryError(Exception):
    """Error for an episode that cannot be played with the given options. The message contains the option and the fix.

    Args:
        message: error message.
        code: exit code of the command.
    """

    def __init__(self, message: str, code: int = exit_codes.USAGE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Deadlines:
    """Time limits in seconds: for an episode with its score, and for the score."""

    episode: float = 600.0
    score: float = 60.0


@dataclass(frozen=True)
class Tried:
    """Result of `play_once`."""

    played: Played
    sizes: dict[Split, int]
    """Number of tasks of each split."""
    printed: Sequence[str]
    """Last lines that the environment's code printed."""


class WrittenReplies:
    """Model whose replies are given by the caller. If tools are offered, `<tool_call>` in a reply is parsed as a call, as in a run whose
    engine has no parser for calls.

    Args:
        next_reply: function that gets the whole conversation and returns the next reply, or None if there are no more replies.
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
        """Return the next reply; see `ModelClient.complete`. Token limits are ignored.

        Raises:
            TryError: there are no more replies.
        """
        text = await asyncio.to_thread(self._next, messages)
        if text is None:
            raise TryError(
                f"the environment requests reply {self._given + 1}, but only {self._given} were given; add another --reply"
            )
        self._given += 1
        content, found = parse_tool_calls(text) if tools else (text, [])
        if not found:
            return Reply(text)
        # Ids of nine letters and digits, which the strictest chat templates require.
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
    """Model of an OpenAI-compatible server.

    Args:
        base_url: address such as `http://localhost:8000/v1`.
        model: name of the model on the server.
        api_key: key of the server, or an empty text for none.
        temperature: sampling temperature.
        max_tokens: limit of a reply if the environment sets none.
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
        """Send the conversation to the server; see `ModelClient.complete`.

        Raises:
            TryError: the server rejected the request or returned something else than a reply.
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
    """Load an environment in its own process, play one task, and end the process and all its children.

    Args:
        command: environment to load.
        task: task to play.
        model: model that replies.
        deadlines: time limits of the episode.

    Raises:
        StartError: the environment cannot be loaded.
        TryError: the task does not exist.
        EpisodeError: the episode failed.
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
