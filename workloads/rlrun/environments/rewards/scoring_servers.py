"""Clients of scoring servers, and reward models on vLLM servers.

`Server` sends requests with a rate limit, retries after temporary errors, and one deadline for all attempts of a request. `RewardModel`
uses one of vLLM's endpoints for sequence classification: `/classify`, `/pooling` or `/score`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rlrun.backoff import backoff
from rlrun.environments.protocol import Message

T = TypeVar("T")


def fill_template(template: str, fields: Mapping[str, str]) -> str:
    """Replace all `{fields}` of a template in one pass, so that braces in a value are not replaced."""
    return re.sub(rf"\{{({'|'.join(fields)})\}}", lambda match: fields[match[1]], template)


_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_MAX_BACKOFF_SECONDS = 30.0


class ServedError(RuntimeError):
    """Error for a server that could not be reached or returned no score."""


class ServedArgs(BaseModel):
    """Arguments of a reward that is computed by a server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field(pattern=r"^https?://[^\s/]")
    """URL of the server."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key. It may be unset if the server needs no key."""
    requests_per_minute: float = Field(default=600.0, gt=0)
    """Largest number of requests per minute, including retries."""
    concurrency: int = Field(default=32, ge=1)
    """Largest number of simultaneous requests."""
    deadline_seconds: float = Field(default=60.0, gt=0)
    """Time limit of one score, including retries and the wait for the rate limit."""


class RateLimit:
    """Limit of one call every `60 / per_minute` seconds, in order of arrival."""

    def __init__(self, per_minute: float) -> None:
        self._interval = 60.0 / per_minute
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until the caller may continue."""
        now = time.monotonic()
        at, self._next = max(now, self._next), max(now, self._next) + self._interval
        await asyncio.sleep(at - now)


@dataclass(frozen=True)
class _RefusedError(Exception):
    status: int
    text: str
    retry_after: float | None = None


class Server:
    """Client of a scoring server.

    Args:
        args: address, model and limits.
        what: name of the server in messages, such as `the judge`.
        error: class of the errors.
    """

    def __init__(self, args: ServedArgs, what: str, error: type[ServedError] = ServedError) -> None:
        self._args, self._what, self._error = args, what, error
        self._rate = RateLimit(args.requests_per_minute)
        self._slots = asyncio.Semaphore(args.concurrency)
        self._session: Any = None

    async def request_answer(self, path: str, body: Mapping[str, object], parse: Callable[[object], T]) -> T:
        """Send a request until it succeeds, and return the result of `parse` on the JSON answer.

        Raises:
            ServedError: there was no answer before the deadline, or the server rejected the request.
        """
        where, seconds, last = (
            f"{self._what} at {self._args.base_url}",
            self._args.deadline_seconds,
            "no request was sent yet",
        )
        try:
            async with asyncio.timeout(seconds):
                for attempt in range(1_000_000):
                    try:
                        return parse(await self._post_json(path, body))
                    except _RefusedError as error:
                        last = f"status {error.status}: {error.text}"
                        if error.status not in _RETRIED:
                            raise self._error(f"{where} rejected the request: {last}") from error
                        wait = error.retry_after
                    except OSError as error:
                        last, wait = str(error) or type(error).__name__, None
                    # Random delays, so that requests which failed together are not repeated together.
                    pause = backoff(attempt + 1, first=0.5, longest=_MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1.0)
                    await asyncio.sleep(pause if wait is None else wait)
        except TimeoutError as error:
            raise self._error(
                f"{where} returned no score within {seconds:g} seconds; the last failure: {last}"
            ) from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post_json(self, path: str, body: Mapping[str, object]) -> object:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=True)  # a hosted judge may be reached through a proxy
        key = os.environ.get(self._args.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._slots:
            await self._rate.turn()
            url = f"{self._args.base_url.rstrip('/')}/{path}"
            try:
                async with self._session.post(url, json=body, headers=headers) as response:
                    text = await response.text()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            after = response.headers.get("Retry-After", "")
            wait = float(after) if after.replace(".", "", 1).isdigit() else None
            raise _RefusedError(response.status, text[:200], wait)
        try:
            return json.loads(text)
        except ValueError:
            raise self._error(f"{self._what} did not return JSON: {text[:200]!r}") from None


class RewardModelError(ServedError):
    """Error for a reward model that could not be reached or returned no score."""


class RewardModelArgs(ServedArgs):
    """Arguments of the reward `reward-model`; `base_url` is the server's root, without a path of its API."""

    endpoint: Literal["classify", "pooling", "score"] = "classify"
    """Endpoint of the server. `classify` and `pooling` get one input, `score` gets the question and the reply as a pair."""
    input: Literal["messages", "text"] = "messages"
    """`messages`: the whole conversation, to which the server applies the model's chat template. `text`: the filled `template`."""
    template: str = "{question}\n\n{reply}"
    """Text for `input: text`, with `{question}` and `{reply}`."""
    label: int | None = Field(default=None, ge=0)
    """Index of the score in the returned numbers. Only a model with one label works without it."""
    scale: float = Field(default=1.0, gt=0)
    """Divisor of the score."""
    body: dict[str, object] = Field(default_factory=dict)
    """Additional fields of each request, such as `use_activation: false` for scores without a sigmoid or softmax."""


class RewardModel:
    """Scorer of conversations with a reward model.

    Args:
        args: model and server.
    """

    def __init__(self, args: RewardModelArgs) -> None:
        self._args, self._server = args, Server(args, "the reward model", RewardModelError)
        self.close = self._server.close

    async def score(self, *, prompt: Sequence[Message], question: str, reply: str) -> float:
        """Return the score of a reply.

        Args:
            prompt: conversation before the reply.
            question: the same conversation as a text.
            reply: reply of the policy.

        Raises:
            RewardModelError: there was no score before the deadline, or the server rejected the request.
        """
        args = self._args
        body: dict[str, object] = {"model": args.model, **args.body}
        if args.endpoint == "score":
            body |= {"text_1": question, "text_2": reply}
        elif args.input == "messages":
            body["messages"] = [*prompt, {"role": "assistant", "content": reply}]
        else:
            body["input"] = fill_template(args.template, {"question": question, "reply": reply})
        return await self._server.request_answer(args.endpoint, body, self._parse_score) / args.scale

    def _parse_score(self, document: object) -> float:
        numbers = _read_numbers(document, self._args.endpoint)
        if self._args.label is None and len(numbers) != 1:
            raise RewardModelError(
                f"the reward model returned {len(numbers)} numbers for one reply; set label to the index of the score"
            )
        index = self._args.label or 0
        if index >= len(numbers):
            raise RewardModelError(f"the reward model returned {len(numbers)} numbers, so label {index} does not exist")
        return numbers[index]


def _read_numbers(document: Any, endpoint: str) -> list[float]:
    """Return the numbers of the only item of an answer. Raises RewardModelError if the answer has another format."""
    try:
        found = {"classify": "probs", "pooling": "data", "score": "score"}[endpoint]
        value = document["data"][0][found]
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = value[-1]  # one vector per token: the vector of the last token is the score of the whole text
        return [float(number) for number in (value if isinstance(value, list) else [value])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardModelError(
            f"the reward model did not return an answer of /{endpoint}: {str(document)[:200]}"
        ) from error
