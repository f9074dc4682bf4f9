"""External servers that answer instead of engines: their configuration, the choice of a server, and retries.

The names in files and options are those of PRIME-RL.

A request goes to the server with the fewest requests. Transient errors (429, 5xx, a broken or slow connection, an incomplete answer) are
retried, first at another server, after the delay that the server requests or a growing backoff. Errors of one question (400, 413, 422) fail
that question. Errors of all questions (the key, the model's name, several failed questions in a row) end the command.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Self
from urllib.parse import urlsplit

from loguru import logger
from pydantic import Field, field_validator, model_validator

from rlrun.backoff import backoff, jittered
from rlrun.config.base import Config
from rlrun.config.formats import VariableName
from rlrun.config.loading.schema import few_in_order
from rlrun.environments.chat_server import ChatServer, ServerError
from rlrun.environments.protocol import Reply
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

KEY_VARIABLES = ("VLLM_API_KEY", "OPENAI_API_KEY")
"""Default variables of the key; the first one that is set is used."""


class ClientConfig(Config):
    """OpenAI-compatible servers that answer instead of engines. They return no token ids and no log-probs, so no
    training uses them.
    """

    base_url: Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        default_factory=lambda: ["http://localhost:8000/v1"]
    )
    """URLs up to `/chat/completions`, such as `https://api.openai.com/v1`. Several servers must serve the same model.
    """
    api_key_var: VariableName | None = None
    """Environment variable of the key. Default: VLLM_API_KEY, otherwise OPENAI_API_KEY."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Additional headers of each request."""
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 1200.0
    """Timeout of one reply with its connection, in seconds."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 6
    """Retries of a request after a transient error: 429, 5xx, a broken or slow connection, an incomplete answer."""
    skip_model_check: bool = False
    """Whether to use a server whose list of models lacks the model's name."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _accept_single_url(cls, given: object) -> object:
        """Accept a single URL like PRIME-RL's files."""
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        for url in self.base_url:
            if problem := _url_problem(url):
                raise ValueError(f"base_url: got {url!r}; {problem}")
        if len(set(self.base_url)) < len(self.base_url):
            raise ValueError("base_url: contains a URL twice; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_headers(self) -> Self:
        for name, value in self.headers.items():
            if not name or not name.isascii() or any(c in name for c in " :\r\n\t") or not name.isprintable():
                raise ValueError(f"headers: got {name!r}; expected the name of a header such as X-Organization")
            if not value.isprintable():
                raise ValueError(f"headers.{name}: contains a character that is not allowed in headers")
            if name.lower() in ("content-type", "content-length", "transfer-encoding", "host"):
                raise ValueError(f"headers.{name}: is set by the HTTP client; remove it")
        return self

    @model_validator(mode="after")
    def _check_variable(self) -> Self:
        if self.api_key_var is not None and self.api_key_var.endswith("*"):
            raise ValueError(f"api_key_var: got {self.api_key_var!r}; expected the name of one variable")
        return self

    def api_key(self, env: Mapping[str, str]) -> str:
        """Return the key, or an empty text."""
        names = KEY_VARIABLES if self.api_key_var is None else (self.api_key_var,)
        return next((env[name].strip() for name in names if env.get(name, "").strip()), "")

    @property
    def key_source(self) -> str:
        """Name of the key's variable or variables, for messages."""
        return self.api_key_var or " or ".join(KEY_VARIABLES)


def _url_problem(url: str) -> str:
    """Return the problem of a server's URL, or an empty text."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port
        usable = False
    if not usable or not url.isprintable() or " " in url:
        return "expected a URL such as https://api.openai.com/v1"
    if parts.query or parts.fragment:
        return "expected a URL without ? and #"
    if "/chat/completions" in parts.path:
        return "expected the URL without /chat/completions, which is added"
    return ""


FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
LONGEST_RETRY_AFTER_SECONDS = 600.0
"""Limit of a requested delay. A longer one ends the command."""
FAILED_IN_A_ROW = 8
"""Consecutive failed questions after which the command ends."""
_KEPT = "finished answers are saved"
_OF_KEY, _OF_ALL = (401, 403), (402, 404)
_NEWER_LIMIT = "max_completion_tokens"


class RefusedError(Exception):
    """A question that a server does not answer; others may be answered."""


@dataclass
class _Kept:
    """State of a server."""

    server: ChatServer
    asked: int = 0
    """Running requests."""
    failures: int = 0
    """Failures in a row."""
    again: float = 0.0
    """Earliest time of the next request (monotonic seconds)."""


class Servers:
    """Servers of one model.

    Args:
        client: configuration of the servers.
        env: environment variables with the key.
    """

    def __init__(self, client: ClientConfig, env: Mapping[str, str]) -> None:
        self._client, self._key = client, client.api_key(env)
        open_server = partial(ChatServer, api_key=self._key, headers=client.headers, timeout_seconds=client.timeout)
        self._known = [_Kept(open_server(url)) for url in client.base_url]
        self._failed = 0
        self._newer_limit = False

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(kept.server.close() for kept in self._known))

    async def model(self, wanted: str | None) -> str:
        """Return the name of the model to use, after a request to each server.

        Args:
            wanted: name of the model. None: the only model of the servers.

        Raises:
            RoleError: a server is unreachable, refuses the key, or does not have the model.
        """
        away: list[RoleError] = []
        for kept in self._known:
            try:
                names = await self._list_models(kept.server)
            except RoleError as error:
                if error.code != exit_codes.UNAVAILABLE or len(away) + 1 == len(self._known):
                    raise
                away.append(error)
                logger.warning(f"{error}; continuing with the other servers")
                continue
            wanted = self._check_model_name(kept.server, wanted, names)
        assert wanted is not None
        return wanted

    def _check_model_name(self, server: ChatServer, wanted: str | None, names: Sequence[str] | None) -> str:
        """Return the name of the model to use, which this server has."""
        if wanted is None:
            if names is None:
                raise RoleError(
                    f"{server.base_url} does not list its models; set one with --model.name", exit_codes.USAGE
                )
            if len(names) != 1:
                raise RoleError(
                    f"{server.base_url} serves {len(names)} models; set one of them with --model.name: "
                    f"{few_in_order(names)}",
                    exit_codes.USAGE,
                )
            return names[0]
        if names is not None and wanted not in names and not self._client.skip_model_check:
            raise self._no_such_model(server, wanted, names)
        return wanted

    async def ask(self, body: Mapping[str, object]) -> Reply:
        """Return the reply to one request.

        Raises:
            RefusedError: the servers do not answer this question.
            RoleError: the servers would not answer any question.
        """
        try:
            reply = await self._request_with_retry(body)
        except RefusedError as error:
            self.failed(str(error))
            raise
        self._failed = 0
        return reply

    def failed(self, why: str) -> None:
        """Count an unanswered question.

        Raises:
            RoleError: too many questions in a row were not answered.
        """
        self._failed += 1
        if self._failed >= FAILED_IN_A_ROW:
            raise RoleError(
                f"{self._failed} questions in a row were not answered, the last one: {why}; {_KEPT}",
                exit_codes.UNAVAILABLE,
            )

    async def ready(self) -> None:
        """Wait until a server accepts a request, so that the wait does not count for an episode's timeout."""
        await self._wait_for_server(())

    async def _request_with_retry(self, body: Mapping[str, object]) -> Reply:
        avoided: list[_Kept] = []
        tries = self._client.max_retries + 1
        for attempt in range(1, tries + 1):
            kept = await self._wait_for_server(avoided)
            kept.asked += 1
            try:
                reply = await kept.server.chat(self._with_newer_limit(body))
            except ServerError as error:
                if self._takes_newer_limit(error):
                    logger.info(f"{kept.server.base_url} expects {_NEWER_LIMIT} instead of max_tokens")
                    continue
                await self._raise_if_permanent(kept.server, error, str(body["model"]))
                if attempt == tries:
                    raise RefusedError(f"{tries} tries failed, the last one with: {error}") from error
                avoided = [*avoided, kept] if len(avoided) + 1 < len(self._known) else []
                self._delay_server(kept, error)
            else:
                kept.failures = 0
                return reply
            finally:
                kept.asked -= 1
        raise RefusedError(f"{tries} tries failed: the server refuses max_tokens and {_NEWER_LIMIT}")

    async def _wait_for_server(self, avoided: Sequence[_Kept]) -> _Kept:
        """Wait until a server accepts a request, and return it."""
        while True:
            others = [kept for kept in self._known if kept not in avoided]
            now = time.monotonic()
            free = [kept for kept in others if kept.again <= now]
            if free:
                return min(free, key=lambda kept: (kept.asked, kept.failures))
            await asyncio.sleep(max(0.01, min(kept.again for kept in others) - now))

    async def _raise_if_permanent(self, server: ChatServer, error: ServerError, model: str) -> None:
        """Raise an error if a retry cannot help; return if the request should be retried."""
        if error.status in _OF_KEY:
            raise self._no_key(error) from error
        if error.status in _OF_ALL:
            names = await self._list_models(server) if error.status == 404 else None
            if names is not None and model not in names:
                raise self._no_such_model(server, model, names) from error
            fix = _address_hint(server.base_url) if error.status == 404 else ""
            raise RoleError(f"client.base_url: {error}{fix}; {_KEPT}", exit_codes.CONFIGURATION) from error
        if not error.passing:
            raise RefusedError(str(error)) from error
        if (error.retry_after or 0) > LONGEST_RETRY_AFTER_SECONDS:
            raise RoleError(
                f"client.base_url: {error}; it requests a delay of {error.retry_after:.0f} s; {_KEPT}",
                exit_codes.UNAVAILABLE,
            ) from error

    def _delay_server(self, kept: _Kept, error: ServerError) -> None:
        kept.failures += 1
        seconds = backoff(kept.failures, first=FIRST_BACKOFF_SECONDS, longest=LONGEST_BACKOFF_SECONDS)
        # Jitter spreads requests that failed together. A delay requested by the server is a lower bound.
        seconds = jittered(seconds, 0.25, random.random()) if error.retry_after is None else error.retry_after
        kept.again = max(kept.again, time.monotonic() + seconds)
        logger.warning(f"{error}; retry in {seconds:.1f} s")

    def _with_newer_limit(self, body: Mapping[str, object]) -> dict[str, object]:
        spelled = dict(body)
        if self._newer_limit and "max_tokens" in spelled:
            spelled[_NEWER_LIMIT] = spelled.pop("max_tokens")
        return spelled

    def _takes_newer_limit(self, error: ServerError) -> bool:
        """Return whether a server requests the newer name of `max_tokens` for the first time, as OpenAI's reasoning
        models do.
        """
        if error.status != 400 or self._newer_limit or _NEWER_LIMIT not in error.said:
            return False
        self._newer_limit = True
        return True

    async def _list_models(self, server: ChatServer) -> list[str] | None:
        try:
            return await server.models()
        except ServerError as error:
            if error.status in _OF_KEY:
                raise self._no_key(error) from error
            raise RoleError(
                f"client.base_url: {error}; start the server, or set another one with --client.base-url",
                exit_codes.UNAVAILABLE,
            ) from error

    def _no_key(self, error: ServerError) -> RoleError:
        source = self._client.key_source
        why = f"the key in {source} is refused" if self._key else f"the server needs a key; set it in {source}"
        more = "" if self._client.api_key_var else ", or select another variable with --client.api-key-var"
        return RoleError(f"client.api_key_var: {why}{more} ({error})", exit_codes.CONFIGURATION)

    def _no_such_model(self, server: ChatServer, model: str, names: Sequence[str]) -> RoleError:
        return RoleError(
            f"model.name: {server.base_url} has no model {model!r}; its models are: {few_in_order(names)}",
            exit_codes.CONFIGURATION,
        )


def _address_hint(url: str) -> str:
    """Return a hint if the URL lacks the usual path."""
    return "" if urlsplit(url).path.strip("/") else f" (try {url}/v1)"
