"""The orchestrator's client of one inference server: generation with log-probs and versions, weight hand-over, readiness.

Every call has a deadline. If a task in `generate` is cancelled, its connection closes and the engine aborts the request. This module
imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Self, TypedDict

import aiohttp
from yarl import URL

from rlrun.inference.client.completions import (
    Adapter,
    Completion,
    EngineError,
    EngineMetrics,
    EngineUnavailableError,
    ParsedReply,
    parse_metrics,
    parse_packed,
    parse_stock,
)
from rlrun.protocol.messages.endpoints import (
    ENGINE_GENERATE,
    ENGINE_GENERATE_PACKED,
    ENGINE_METRICS,
    ENGINE_PARSE,
    ENGINE_READY,
    ENGINE_RECEIVE_WEIGHTS,
    ENGINE_RELOAD_WEIGHTS,
    ENGINE_SLEEP,
    ENGINE_STATUS,
    ENGINE_UPDATE_WEIGHTS,
    HEADER,
    OWN,
)
from rlrun.protocol.messages.packed_columns import MEDIA_TYPE, integer_column, pack_document
from rlrun.runtime.background_compute import compute_without_blocking
from rlrun.runtime.json_types import Json

__all__ = ["Adapter", "Completion", "EngineClient", "EngineError", "EngineUnavailableError"]

IDLE_SECONDS = 30
"""Idle connections are closed before the server closes them (after 75 s), so that no request is written to a closing connection."""

OK = 200
_GONE = (404, 410)
"""Statuses of vLLM's route and of RLRun's route for an adapter that the server does not have."""
_COPIED = 16
"""Packed bytes that are decoded in the same time as one byte of JSON."""
_NO_ROUTE = (403, 404, 405)
"""Statuses of a server without the packed route: plain vLLM, a proxy, or a guard that does not list the route."""
PACKED_TOKENS, STOCK_TOKENS = 1 << 19, 1 << 16
"""Maximum tokens of one response, unless a single continuation may be longer: 4 MB packed, 6 MB as JSON."""
ANSWER_BYTES = 1 << 20
"""Maximum bytes of any response, in addition to the bytes of its tokens."""
METRICS_BYTES = 16 << 20
PACKED_TOKEN_BYTES, STOCK_TOKEN_BYTES = 128, 1 << 10
"""Maximum bytes of one token, including a version span of its own. Typical values: 8 bytes packed, 90 bytes as JSON."""
ROUTES_START = "routed_experts_prompt_start"
"""Sampling parameter of vLLM: number of the prompt's tokens whose experts are not returned."""
ROUTE_BYTES = 1 << 12
"""Maximum bytes of the experts of one token. Typical values: 144 to 500 bytes."""
ROUTED_TOKENS = 1 << 16
"""Maximum tokens of one response with experts, prompts included, unless a single continuation has more: about 32 MB."""
REPLY_TOKEN_BYTES = 1 << 10
"""Maximum bytes per token of a parsed reply, which contains the text up to three times."""
_HEADERS = {"content-type": "application/json"}, {"content-type": MEDIA_TYPE}
KNOWN_ADAPTERS = 32
"""Number of versions whose adapter names are kept."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Response of `/rlrun/ready`."""

    ready: bool
    reason: str | None
    weight_version: int | None


class _Head(TypedDict, total=False):
    """Body of a token request without the prompt."""

    cache_salt: str
    model: str
    sampling_params: Json


class _NoRouteError(Exception):
    """The server has no route for packed requests."""


class EngineClient:
    """Client of one inference server. Timeouts in seconds."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        generate_timeout: float = 600.0,
        update_timeout: float = 660.0,
        control_timeout: float = 30.0,
        connect_timeout: float = 10.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}", HEADER: OWN.header}
        self._generate_timeout = generate_timeout
        self._update_timeout = update_timeout
        self._control_timeout = control_timeout
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._adapters: dict[str, str] = {}
        self._packs = True
        """Whether the server may have the packed route. After a refusal it is tried again after the next hand-over."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections permanently: the engine aborts requests in flight, and later calls raise `EngineUnavailableError`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop_token_ids: Sequence[int],
        cache_salt: str | None,
        parameters: Mapping[str, object] | None = None,
    ) -> list[Completion]:
        """Sample `n` continuations of a prompt.

        `parameters` are further sampling parameters with vLLM's names, for example `seed`, the seed of the first continuation; texts in
        `stop` make the engine detokenize.
        `cache_salt` must name the requested policy version: the engine shares cached prefixes only between requests with equal
        salts, and a prefix that was computed with older weights is invalid for the newer policy.
        If versions are adapters, the request names the adapter of this version and uses it until it ends.
        With the parameter `routed_experts_prompt_start`, completions have the experts of the tokens from this position on; a server
        without the packed route returns none.
        The size of a response is limited: a request with more tokens is split into several concurrent requests.
        Raises `EngineError`, also for a response without a log-prob or an integer version for each token.
        """
        sampling: Json = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": False,
        }
        head: _Head = {}
        if cache_salt is not None:
            head["cache_salt"] = cache_salt
        if (model := self._adapters.get(cache_salt or "")) is not None:
            head["model"] = model
        if parameters:
            sampling |= parameters
            if "min_tokens" in sampling:
                # A later turn may have less space left than `min_tokens`; the engine refuses min_tokens > max_tokens.
                sampling["min_tokens"] = min(sampling["min_tokens"], max_tokens)
        head["sampling_params"] = sampling
        prompt = integer_column(token_ids)
        if self._packs:
            try:
                most = PACKED_TOKENS // max_tokens
                if (start := sampling.get(ROUTES_START)) is not None:
                    most = min(most, ROUTED_TOKENS // (len(prompt) - start + max_tokens))
                return await self._in_parts(prompt, head, n, max(1, most), packed=True)
            except _NoRouteError:
                self._packs = False
        sampling.pop(ROUTES_START, None)
        return await self._in_parts(prompt, head, n, max(1, STOCK_TOKENS // max_tokens), packed=False)

    async def _in_parts(self, prompt: array[int], head: _Head, n: int, most: int, *, packed: bool) -> list[Completion]:
        """Request `n` continuations, at most `most` of them per request."""
        if n <= most:
            return await self._request_completions(prompt, _request_part(head, 0, n), packed=packed)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._request_completions(prompt, _request_part(head, at, min(most, n - at)), packed=packed)
                    )
                    for at in range(0, n, most)
                ]
        except* (EngineError, _NoRouteError) as errors:
            error: BaseException = errors
        else:
            return [completion for task in tasks for completion in task.result()]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error

    async def _request_completions(self, prompt: array[int], head: _Head, *, packed: bool) -> list[Completion]:
        """Send one request, packed or in the format of vLLM's own route.

        Raises:
            _NoRouteError: the server does not have the packed route.
            EngineError: see `generate`.
        """
        n, name = head["sampling_params"]["n"], head.get("model")
        adapter = None if name is None else Adapter(name, int(head["cache_salt"]))
        path = ENGINE_GENERATE_PACKED if packed else ENGINE_GENERATE
        longest = head["sampling_params"]["max_tokens"]
        limit = ANSWER_BYTES + n * longest * (PACKED_TOKEN_BYTES if packed else STOCK_TOKEN_BYTES)
        routes_start = head["sampling_params"].get(ROUTES_START)
        if routes_start is not None:
            limit += n * (len(prompt) - routes_start + longest) * ROUTE_BYTES
        if packed:
            body = pack_document(head | {"tokens": len(prompt)}, [prompt])
        else:
            body = await compute_without_blocking(8 * len(prompt), partial(_stock_body, prompt, head))
        status, data = await self._send_request("POST", path, self._generate_timeout, body, limit)
        if packed and status in _NO_ROUTE:
            raise _NoRouteError
        if adapter is not None and status in _GONE:
            # Not an error of the request: the server has restarted and gets the adapter with the next hand-over.
            raise EngineError(f"{self.base_url} no longer holds {name}")
        if status != OK:
            raise self._refusal_error(path, status, data)
        if packed:
            found = await compute_without_blocking(
                len(data) // _COPIED, partial(parse_packed, data, n, adapter, routes_start=routes_start)
            )
        else:
            found = await compute_without_blocking(len(data), partial(parse_stock, data, n, adapter))
        if (most := max(len(completion.token_ids) for completion in found)) > longest:
            raise EngineError(f"{self.base_url}{path} returned {most} tokens, but the request allows {longest}")
        return found

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, object]],
        template_arguments: Mapping[str, object] | None = None,
    ) -> ParsedReply:
        """Parse a reply with the engine's tool-call and reasoning parsers.

        `template_arguments` are the arguments of the chat template for the reply's prompt; they decide whether a reply starts with
        reasoning. Needs neither weights nor a version. Raises `EngineError`.
        """
        arguments = {"chat_template_kwargs": dict(template_arguments)} if template_arguments else {}
        body = {
            "generate_response": {"choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": "stop"}]},
            # Parsers read only the functions, but the request's schema requires messages.
            "chat_request": {"messages": [{"role": "user", "content": ""}], "tools": list(tools), **arguments},
        }
        limit = ANSWER_BYTES + len(token_ids) * REPLY_TOKEN_BYTES
        answer = await self._request_json("POST", ENGINE_PARSE, self._control_timeout, body, limit=limit)
        try:
            message = answer["choices"][0]["message"]
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [(str(function["name"]), str(function["arguments"])) for function in functions]
            # vLLM renamed the field; an older vLLM behind a proxy may send the old name.
            thoughts = message.get("reasoning") or message.get("reasoning_content")
            return ParsedReply(message.get("content") or "", calls, thoughts or None)
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"the engine's answer lacks a field: {error!r}") from None

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
        """Load a published folder as `version`. Returns seconds per phase, empty if the server already had the version."""
        return await self._request_update(
            ENGINE_UPDATE_WEIGHTS, version, {"path": path, "version": version, "force": force}
        )

    async def reload_weights(self, version: int, *, force: bool = False) -> dict[str, float]:
        """Load the model that the server was started with as `version`. Returns seconds per phase."""
        return await self._request_update(ENGINE_RELOAD_WEIGHTS, version, {"version": version, "force": force})

    async def receive_weights(self, trainer_url: str, version: int, *, force: bool = False) -> dict[str, float]:
        """Receive `version` from the memory of the trainer at `trainer_url`. Returns seconds per phase."""
        body = {"trainer_url": trainer_url, "version": version, "force": force}
        return await self._request_update(ENGINE_RECEIVE_WEIGHTS, version, body)

    async def sleep(self) -> None:
        """Free the engine's GPU memory until the next hand-over; a sleeping engine stays asleep."""
        answer = await self._request_json("POST", ENGINE_SLEEP, self._update_timeout, {})
        if not isinstance(answer, dict) or answer.get("asleep") is not True:
            raise EngineError(f"{self.base_url}{ENGINE_SLEEP} returned an unexpected body; expected the state of sleep")

    async def ready(self) -> Readiness:
        """Return the readiness for requests. Raises `EngineUnavailableError` if the server does not respond."""
        answer = await self._request_json("GET", ENGINE_READY, self._control_timeout, accept=(200, 503))
        if not isinstance(answer, dict) or not isinstance(answer.get("ready"), bool):
            raise EngineError(f"{self.base_url}{ENGINE_READY} returned an unexpected body; expected the readiness", 503)
        return Readiness(answer["ready"], answer.get("reason"), answer.get("weight_version"))

    async def status(self) -> dict[str, object]:
        """Return weight version, path, liveness and fault, as the server reports them."""
        answer = await self._request_json("GET", ENGINE_STATUS, self._control_timeout)
        if not isinstance(answer, dict):
            raise EngineError(f"{self.base_url}{ENGINE_STATUS} returned an unexpected body; expected the status")
        return dict(answer)

    async def metrics(self) -> EngineMetrics:
        """Return the numbers of running and waiting requests, and the use of the KV cache."""
        _, data = await self._send_request("GET", ENGINE_METRICS, self._control_timeout, limit=METRICS_BYTES)
        return parse_metrics(data.decode(errors="replace"))

    async def _request_update(self, path: str, version: int, body: Mapping[str, object]) -> dict[str, float]:
        answer = await self._request_json("POST", path, self._update_timeout, body)
        if not isinstance(answer, dict) or not isinstance(answer.get("seconds"), dict):
            raise EngineError(f"{self.base_url}{path} returned an unexpected body; expected the result of an update")
        self._packs = True
        self._adapters.pop(str(version), None)
        if answer.get("model") is not None:
            self._adapters[str(version)] = answer["model"]
            for old in list(self._adapters)[:-KNOWN_ADAPTERS]:
                del self._adapters[old]
        return dict(answer["seconds"])

    async def _read_body(self, path: str, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """Read the body; a large body is joined outside of the event loop.

        Raises:
            EngineError: the body has more than `limit` bytes; the rest is not read.
        """
        blocks, size = [], 0
        while block := await response.content.readany():
            blocks.append(block)
            size += len(block)
            if size > limit:
                response.close()
                raise EngineError(f"{self.base_url}{path} returned more than the {limit} bytes that the request allows")
        return await compute_without_blocking(size // _COPIED, partial(b"".join, blocks))

    async def _request_json(
        self,
        method: str,
        path: str,
        timeout: float,
        body: Mapping[str, object] | None = None,
        accept: Sequence[int] = (200,),
        limit: int = ANSWER_BYTES,
    ) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        status, data = await self._send_request(method, path, timeout, sent, limit)
        if status not in accept:
            raise self._refusal_error(path, status, data)
        try:
            return json.loads(data)
        except ValueError:
            raise EngineError(f"{self.base_url}{path} returned {status} without JSON", status) from None

    def _refusal_error(self, path: str, status: int, data: bytes) -> EngineError:
        return EngineError(f"{self.base_url}{path} returned {status}: {_error_message(data)}", status)

    async def _send_request(
        self, method: str, path: str, timeout: float, body: bytes | None = None, limit: int = ANSWER_BYTES
    ) -> tuple[int, bytes]:
        if self._closed:
            raise EngineUnavailableError(f"{self.base_url}{path}: the client of this engine is closed")
        if self._session is None:
            # No limit: the dispatcher decides how many requests are in flight; a second queue here would hide them.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            # Unneeded headers and cookies cost CPU time per request, which dominates the cost of short rollouts.
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        deadline = aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout)
        try:
            url, headers = (
                _parse_url(self.base_url + path),
                _HEADERS[path == ENGINE_GENERATE_PACKED] if body is not None else None,
            )
            async with self._session.request(method, url, data=body, headers=headers, timeout=deadline) as response:
                return response.status, await self._read_body(path, response, limit)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailableError(f"{self.base_url}{path}: {error or type(error).__name__}") from error
        except TimeoutError as error:
            raise EngineUnavailableError(f"{self.base_url}{path}: no response within {timeout:g} s") from error
        except RuntimeError as error:
            if not self._closed:
                raise
            # aiohttp raises RuntimeError if the session is closed while it retries a request.
            raise EngineUnavailableError(f"{self.base_url}{path}: the client of this engine is closed") from error


@lru_cache(1024)
def _parse_url(text: str) -> URL:
    """Parse a URL; cached, because few URLs are requested up to a thousand times per second."""
    return URL(text)


def _stock_body(prompt: array[int], head: _Head) -> bytes:
    sampling = head["sampling_params"] | {"logprobs": 0, "detokenize": bool(head["sampling_params"].get("stop"))}
    return json.dumps({**head, "token_ids": prompt.tolist(), "sampling_params": sampling}).encode()


def _request_part(head: _Head, first: int, n: int) -> _Head:
    """Return the request for `n` continuations of a group, starting at index `first`, with its own seed."""
    part: _Head = {**head, "sampling_params": head["sampling_params"] | {"n": n}}
    if "seed" in part["sampling_params"]:
        part["sampling_params"]["seed"] += first
    return part


def _error_message(data: bytes) -> str:
    """Return the message of an error body of RLRun, vLLM or FastAPI."""
    text = data.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:500] or "empty body"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
    return json.dumps(body)[:500]
