"""Environments whose episodes are played by an unchanged program for OpenAI's client.

Each environment starts one server with the first episode. The program's requests to it are answered by the policy.
"""

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
"""Time that a canceled agent has to clean up."""
_LAST_CHARACTERS = 500


class AgentEnvironment(ABC):
    """Environment that is played by a program. Subclasses define the tasks, the program and the score of an episode.

    The program can send any number of requests to `endpoint` and keeps the conversation itself. Its return value becomes
    `Episode.info["result"]`.
    """

    id: str

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]: ...

    @abstractmethod
    async def agent(self, task: Task, endpoint: Endpoint) -> object:
        """Play one episode and return a JSON value. The endpoint is available only until this method returns."""

    @abstractmethod
    async def score(self, task: Task, episode: Episode) -> Score: ...

    async def run(self, task: Task, model: ModelClient) -> Episode:
        """Play one episode.

        Returns:
            Episode with `info`: `result`, `truncated`, and `agent_error` (the failure of the program after the conversation became too
            long, else None).

        Raises:
            RuntimeError: the program sent no request to the model.
        """
        server = await self._get_server()
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
            # An episode without a reply has nothing to train on, so it counts as a failure of the program.
            if not served.replies:
                raise RuntimeError("the program ended without a reply of the model")
            info = {"result": result, "truncated": served.truncated, "agent_error": error}
            return Episode(served.messages, served.replies, info)

    async def close(self) -> None:
        """Stop the server if it was started."""
        if (server := getattr(self, "_server", None)) is not None:
            await (await server).close()

    async def _get_server(self) -> ChatServer:
        """Return the server, which is started with the first episode."""
        if not hasattr(self, "_server"):  # subclasses do not have to call this class's constructor
            self._server = asyncio.ensure_future(_start_server())
        return await asyncio.shield(self._server)


async def _start_server() -> ChatServer:
    try:
        from rlrun.environments.adapters.openai_server import ChatServer
    except ImportError as error:
        raise RuntimeError(
            f"the agent's server needs the package aiohttp ({error}); install it where the environment runs"
        ) from error
    server = ChatServer()
    await server.start()
    return server


async def _contain_exit(playing: Awaitable[object]) -> object:
    """Convert the exit of a program into an error, so that it ends only its own episode and not the process."""
    try:
        return await playing
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the program raised {type(error).__name__}({error})") from None


async def _program_outcome(playing: asyncio.Future[object], overflowed: bool) -> tuple[object, str | None]:
    """Return the program's return value, and its error or None. A failure after the conversation became too long is scored, not raised."""
    try:
        return await playing, None
    except Exception as error:
        if not overflowed:
            raise
        return None, f"{type(error).__name__}: {error}"[:_LAST_CHARACTERS]


async def run_program(
    command: Sequence[str], endpoint: Endpoint, *, stdin: str = "", variables: Mapping[str, str] | None = None
) -> str:
    """Run a program that reads the policy's address from its environment variables (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`).

    If the call is canceled, the program and all processes of its session are killed.

    Args:
        command: program and its arguments.
        endpoint: address of the policy.
        stdin: standard input of the program.
        variables: additional environment variables.

    Returns:
        Standard output of the program.

    Raises:
        RuntimeError: the program failed; the message contains the end of its standard error.
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
        # If a start is canceled, asyncio kills only the program and not its children. `shield` lets the start finish, then all are killed.
        process = await asyncio.shield(starting)
        output, errors = await process.communicate(stdin.encode())
    finally:
        await _kill_program(starting)
    if process.returncode:
        last = errors.decode(errors="replace").strip()[-_LAST_CHARACTERS:]
        raise RuntimeError(f"{command[0]} ended with code {process.returncode}: {last}")
    return output.decode(errors="replace")


async def _kill_program(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Kill a program and all processes of its session, unless the start failed."""
    with suppress(OSError, TimeoutError):
        process = await asyncio.shield(starting)
        os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
