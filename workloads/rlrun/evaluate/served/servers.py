"""Servers of one model: which one is asked, what is tried again, and when it is of no use to go on.

A request goes to the server with the fewest of them. What passes (429, 5xx, a broken or slow connection, an answer that breaks off) is
tried again, at another server first, after the seconds that the server asks for or a growing backoff. What concerns one question
(400, 413, 422) fails that question. What concerns all of them (the key, the model's name, several questions in a row that fail) ends the
command.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loguru import logger

from rlrun.backoff import backoff, jittered
from rlrun.config.loading.schema import few_in_order
from rlrun.environments.chat_server import ChatServer, ServerError
from rlrun.environments.protocol import Reply
from rlrun.evaluate.served.client import ClientConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
LONGEST_RETRY_AFTER_SECONDS = 600.0
"""A server that asks for more is asked by the next command."""
FAILED_IN_A_ROW = 8
"""Questions without any answer between them after which no other one is asked."""
_KEPT = "what was answered is kept"
_OF_KEY, _OF_ALL = (401, 403), (402, 404)
_NEWER_LIMIT = "max_completion_tokens"


class RefusedError(Exception):
    """One question that a server does not answer; others may be answered."""


@dataclass
class _Kept:
    """State of a server."""

    server: ChatServer
    asked: int = 0
    """Requests under way."""
    failures: int = 0
    """Failures in a row."""
    again: float = 0.0
    """Earliest time of the next request."""


class Servers:
    """Servers of one model.

    Args:
        client: how they are reached.
        env: variables, for the key.
    """

    def __init__(self, client: ClientConfig, env: Mapping[str, str]) -> None:
        self._client, self._key = client, client.api_key(env)
        more = {"api_key": self._key, "headers": client.headers, "timeout_seconds": client.timeout}
        self._known = [_Kept(ChatServer(url, **more)) for url in client.base_url]  # type: ignore[arg-type]
        self._failed = 0
        self._newer_limit = False

    async def close(self) -> None:
        """End the connections."""
        await asyncio.gather(*(kept.server.close() for kept in self._known))

    async def model(self, wanted: str | None) -> str:
        """Name of the model to ask, after a look at each server.

        Args:
            wanted: the name; None: the only one that the servers have.

        Raises:
            RoleError: a server cannot be asked, refuses the key, or has no such model.
        """
        away: list[RoleError] = []
        for kept in self._known:
            try:
                names = await self._models(kept.server)
            except RoleError as error:
                if error.code != exit_codes.UNAVAILABLE or len(away) + 1 == len(self._known):
                    raise
                away.append(error)
                logger.warning(f"{error}; the other servers are asked")
                continue
            wanted = self._checked(kept.server, wanted, names)
        assert wanted is not None
        return wanted

    def _checked(self, server: ChatServer, wanted: str | None, names: Sequence[str] | None) -> str:
        """Name of the model to ask, which this server has."""
        if wanted is None:
            if names is None:
                raise RoleError(
                    f"{server.base_url} does not list its models; name one with --model.name", exit_codes.USAGE
                )
            if len(names) != 1:
                raise RoleError(
                    f"{server.base_url} serves {len(names)} models; name one of them with --model.name: "
                    f"{few_in_order(names)}",
                    exit_codes.USAGE,
                )
            return names[0]
        if names is not None and wanted not in names and not self._client.skip_model_check:
            raise self._no_such_model(server, wanted, names)
        return wanted

    async def ask(self, body: Mapping[str, object]) -> Reply:
        """The reply to one request.

        Raises:
            RefusedError: this question is not answered.
            RoleError: no other one would be.
        """
        try:
            reply = await self._ask(body)
        except RefusedError as error:
            self.failed(str(error))
            raise
        self._failed = 0
        return reply

    def failed(self, why: str) -> None:
        """Count a question that was not answered.

        Raises:
            RoleError: so many were not answered one after the other that no other one is asked.
        """
        self._failed += 1
        if self._failed >= FAILED_IN_A_ROW:
            raise RoleError(
                f"{self._failed} questions in a row were not answered, the last one: {why}; {_KEPT}",
                exit_codes.UNAVAILABLE,
            )

    async def ready(self) -> None:
        """Wait until a server may be asked, so that no episode's deadline runs meanwhile."""
        await self._next(())

    async def _ask(self, body: Mapping[str, object]) -> Reply:
        avoided: list[_Kept] = []
        tries = self._client.max_retries + 1
        for attempt in range(1, tries + 1):
            kept = await self._next(avoided)
            kept.asked += 1
            try:
                reply = await kept.server.chat(self._spelled(body))
            except ServerError as error:
                if self._takes_newer_limit(error):
                    logger.info(f"{kept.server.base_url} takes {_NEWER_LIMIT} for max_tokens")
                    continue
                await self._judge(kept.server, error, str(body["model"]))
                if attempt == tries:
                    raise RefusedError(f"{tries} tries failed, the last one: {error}") from error
                avoided = [*avoided, kept] if len(avoided) + 1 < len(self._known) else []
                self._wait(kept, error)
            else:
                kept.failures = 0
                return reply
            finally:
                kept.asked -= 1
        raise RefusedError(f"{tries} tries failed: the server refuses max_tokens and {_NEWER_LIMIT}")

    async def _next(self, avoided: Sequence[_Kept]) -> _Kept:
        """The server to ask next, once it may be asked."""
        while True:
            others = [kept for kept in self._known if kept not in avoided]
            now = time.monotonic()
            free = [kept for kept in others if kept.again <= now]
            if free:
                return min(free, key=lambda kept: (kept.asked, kept.failures))
            await asyncio.sleep(max(0.01, min(kept.again for kept in others) - now))

    async def _judge(self, server: ChatServer, error: ServerError, model: str) -> None:
        """Raise what no other try helps with; return where the request is to be tried again."""
        if error.status in _OF_KEY:
            raise self._no_key(error) from error
        if error.status in _OF_ALL:
            names = await self._models(server) if error.status == 404 else None
            if names is not None and model not in names:
                raise self._no_such_model(server, model, names) from error
            fix = _address_hint(server.base_url) if error.status == 404 else ""
            raise RoleError(f"client.base_url: {error}{fix}; {_KEPT}", exit_codes.CONFIGURATION) from error
        if not error.passing:
            raise RefusedError(str(error)) from error
        if (error.retry_after or 0) > LONGEST_RETRY_AFTER_SECONDS:
            raise RoleError(
                f"client.base_url: {error}; it asks to come back in {error.retry_after:.0f} s; {_KEPT}",
                exit_codes.UNAVAILABLE,
            ) from error

    def _wait(self, kept: _Kept, error: ServerError) -> None:
        kept.failures += 1
        seconds = backoff(kept.failures, first=FIRST_BACKOFF_SECONDS, longest=LONGEST_BACKOFF_SECONDS)
        # Requests that failed together do not come back together; a server's own wish is a lower bound.
        seconds = jittered(seconds, 0.25, random.random()) if error.retry_after is None else error.retry_after
        kept.again = max(kept.again, time.monotonic() + seconds)
        logger.warning(f"{error}; asked again in {seconds:.1f} s")

    def _spelled(self, body: Mapping[str, object]) -> dict[str, object]:
        spelled = dict(body)
        if self._newer_limit and "max_tokens" in spelled:
            spelled[_NEWER_LIMIT] = spelled.pop("max_tokens")
        return spelled

    def _takes_newer_limit(self, error: ServerError) -> bool:
        """True the first time that a server asks for the newer name of `max_tokens`, as OpenAI's reasoning models do."""
        if error.status != 400 or self._newer_limit or _NEWER_LIMIT not in error.said:
            return False
        self._newer_limit = True
        return True

    async def _models(self, server: ChatServer) -> list[str] | None:
        try:
            return await server.models()
        except ServerError as error:
            if error.status in _OF_KEY:
                raise self._no_key(error) from error
            raise RoleError(
                f"client.base_url: {error}; start the server, or name another one with --client.base-url",
                exit_codes.UNAVAILABLE,
            ) from error

    def _no_key(self, error: ServerError) -> RoleError:
        source = self._client.key_source
        why = f"the key in {source} is refused" if self._key else f"no key is set: put it into {source}"
        more = "" if self._client.api_key_var else ", or name another variable with --client.api-key-var"
        return RoleError(f"client.api_key_var: {why}{more} ({error})", exit_codes.CONFIGURATION)

    def _no_such_model(self, server: ChatServer, model: str, names: Sequence[str]) -> RoleError:
        return RoleError(
            f"model.name: {server.base_url} has no model {model!r}; its models are: {few_in_order(names)}",
            exit_codes.CONFIGURATION,
        )


def _address_hint(url: str) -> str:
    """Hint to an address that lacks its usual end."""
    return "" if urlsplit(url).path.strip("/") else f" (is it {url}/v1?)"
