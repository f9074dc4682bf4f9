"""Environments whose episode is a program written for OpenAI's client, which is trained as it is."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rlrun.environments.protocol import Episode, ModelClient, Score, Split, Task

if TYPE_CHECKING:
    from rlrun.environments.adapters.openai_server import ChatServer, Endpoint

END_SECONDS = 1.0
"""Time in which an agent that is cancelled may clean up."""
_LAST_CHARACTERS = 500


class AgentEnvironment(ABC):
    """Environment by a program: subclasses define the tasks, the program that plays one, and an episode's score.

    The program talks to `endpoint` as often as it likes and keeps the conversation as it likes. What it returns is
    `Episode.info["result"]`.
    """

    id: str

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]: ...

    @abstractmethod
    async def agent(self, task: Task, endpoint: Endpoint) -> object:
        """Play one episode; the result must be JSON. Its process has the endpoint for as long as this runs."""

    @abstractmethod
    async def score(self, task: Task, episode: Episode) -> Score: ...

    async def run(self, task: Task, model: ModelClient) -> Episode:
        """Play one episode. `info`: `result`, `truncated`, and `agent_error`, why the program failed after its conversation had
        become too long (else None).

        Raises:
            RuntimeError: the program did not ask the model at all.
        """
        server = await self._started()
        async with server.episode(model) as served:
            playing = asyncio.ensure_future(_contain_exit(self.agent(task, served.endpoint)))
            try:
                ends: set[asyncio.Future[object] | asyncio.Future[None]] = {playing, served.failed}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if served.failed.done():
                    served.failed.result()
                result, error = await _program_outcome(playing, served.overflowed)
            finally:
                playing.cancel()
                await asyncio.wait({playing}, timeout=END_SECONDS)
            if not served.replies:
                raise RuntimeError("the program ended without a reply of the model")
            info = {"result": result, "truncated": served.truncated, "agent_error": error}
            return Episode(served.messages, served.replies, info)

    async def close(self) -> None:
        """Stop the server."""
        if (server := getattr(self, "_server", None)) is not None:
            await (await server).close()

    async def _started(self) -> ChatServer:
        """The server, started with the first episode."""
        if not hasattr(self, "_server"):  # subclasses need not call our constructor
            self._server = asyncio.ensure_future(_start_server())
        return await asyncio.shield(self._server)


async def _start_server() -> ChatServer:
    try:
        from rlrun.environments.adapters.openai_server import ChatServer
    except ImportError as error:
        raise RuntimeError(f"its server needs the package aiohttp ({error}); install it where it runs") from error
    server = ChatServer()
    await server.start()
    return server


async def _contain_exit(playing: Awaitable[object]) -> object:
    """Let a program that wants to end its process end only its own episode."""
    try:
        return await playing
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the program raised {type(error).__name__}({error})") from None


async def _program_outcome(playing: asyncio.Future[object], overflowed: bool) -> tuple[object, str | None]:
    """The program's return value, and its error or None. A failure for lack of room has played to the end: it is scored."""
    try:
        return await playing, None
    except Exception as error:
        if not overflowed:
            raise
        return None, f"{type(error).__name__}: {error}"[:_LAST_CHARACTERS]


async def run_program(
    command: Sequence[str], endpoint: Endpoint, *, stdin: str = "", variables: Mapping[str, str] | None = None
) -> str:
    """Run a program that finds the policy in its environment variables (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`).

    Args:
        command: the program and its arguments.
        endpoint: the policy.
        stdin: its standard input.
        variables: more environment variables.

    Returns:
        Its standard output. When this is cancelled the program and what it started in its session are killed.

    Raises:
        RuntimeError: it failed; the message has the end of its standard error.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(variables or {}), **endpoint.variables()},
            start_new_session=True,
        )
    )
    try:
        # Given up while it starts, asyncio would kill the program alone, and not what that has started by then.
        process = await asyncio.shield(starting)
        output, errors = await process.communicate(stdin.encode())
    finally:
        await _kill_program(starting)
    if process.returncode:
        last = errors.decode(errors="replace").strip()[-_LAST_CHARACTERS:]
        raise RuntimeError(f"{command[0]} ended with code {process.returncode}: {last}")
    return output.decode(errors="replace")


async def _kill_program(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Kill a program, and what it started in its session, if it started at all."""
    with suppress(OSError, TimeoutError):
        process = await asyncio.shield(starting)
        os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
