"""The orchestrator's side of an inference server: generation with log-probs and versions, hand-over, readiness.

Every call has a deadline. Cancelling a task that waits in `generate` closes its connection, and the engine then aborts
the request. Knows nothing of vLLM or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from rlrun.protocol.endpoints import (
    ENGINE_GENERATE,
    ENGINE_METRICS,
    ENGINE_PARSE,
    ENGINE_READY,
    ENGINE_RECEIVE_WEIGHTS,
    ENGINE_RELOAD_WEIGHTS,
    ENGINE_SLEEP,
    ENGINE_STATUS,
    ENGINE_UPDATE_WEIGHTS,
)

IDLE_SECONDS = 30
"""Idle connections are dropped before the server drops them (75 s), so that no request is written to a closing one."""

NOT_FOUND = 404
_LOAD = frozenset(
    f"vllm:{name}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
)
KNOWN_ADAPTERS = 32
"""Versions whose adapter's name is remembered."""


class EngineError(Exception):
    """The server refused, failed, or answered something that must not be trained on."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineUnavailableError(EngineError):
    """No answer: connection refused or broken, or a deadline passed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation; the three lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural logarithms, after temperature and top-p: of what was sampled from."""
    versions: list[int]
    """The policy version that sampled the token."""
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """A policy version that the engine holds as an adapter of this name."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Load of one server, summed over its engines."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction of the KV cache in use, of the fullest engine."""
    preemptions: int | None = None
    """Sequences put off since the server's start because the KV cache was full; None: it does not say."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What `/rlrun/ready` says."""

    ready: bool
    reason: str | None
    weight_version: int | None


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
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._generate_timeout = generate_timeout
        self._update_timeout = update_timeout
        self._control_timeout = control_timeout
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._adapters: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections for good; requests in flight are aborted in the engine, later ones find it unavailable."""
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
        seed: int | None = None,
        request_id: str | None = None,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Sample `n` continuations of a prompt.

        `cache_salt` must name the policy version that the request is meant for: the engine shares cached prefixes only
        between requests with equal salts, and a prefix computed under older weights is not one of the newer policy.
        Where versions are adapters, the request names the one that holds this version, and keeps it to its end.
        Raises `EngineError`, also for an answer without a log-prob or an integer version for each token.
        """
        sampling: dict[str, Any] = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": ignore_eos,
            "logprobs": 0,
            "detokenize": False,
        }
        if seed is not None:
            sampling["seed"] = seed
        body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": sampling}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        if request_id is not None:
            body["request_id"] = request_id
        adapter = self._adapters.get(cache_salt or "")
        if adapter is not None:
            body["model"] = adapter
        try:
            answer = await self._json("POST", ENGINE_GENERATE, self._generate_timeout, body)
        except EngineError as error:
            if adapter is None or error.status != NOT_FOUND:
                raise
            # No fault of the request: the server has started anew, and gets its adapter with the next hand-over.
            raise EngineError(f"{self.base_url} no longer holds {adapter}") from None
        if adapter is None:
            return parse_completions(answer, n)
        return parse_completions(answer, n, Adapter(adapter, int(cache_salt or "")))

    async def parse(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[str, str]]]:
        """A reply taken apart by the engine's parser: the text without calls, and (name, arguments as JSON) of each call.

        Raises `EngineError`. Needs no weights, and no version.
        """
        body = {
            "generate_response": {"choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": "stop"}]},
            # Parsers look at the functions; what was said before is only demanded by the request's form.
            "chat_request": {"messages": [{"role": "user", "content": ""}], "tools": list(tools)},
        }
        answer = await self._json("POST", ENGINE_PARSE, self._control_timeout, body)
        try:
            message = answer["choices"][0]["message"]
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            return message.get("content") or "", [(str(f["name"]), str(f["arguments"])) for f in functions]
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"the engine's answer lacks a field: {error!r}") from None

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
        """Load a published folder as `version`; seconds per phase, empty if the server held it already."""
        return await self._change(ENGINE_UPDATE_WEIGHTS, version, {"path": path, "version": version, "force": force})

    async def reload_weights(self, version: int, *, force: bool = False) -> dict[str, float]:
        """Load the model that the server was started with as `version`; seconds per phase."""
        return await self._change(ENGINE_RELOAD_WEIGHTS, version, {"version": version, "force": force})

    async def receive_weights(self, trainer_url: str, version: int, *, force: bool = False) -> dict[str, float]:
        """Have `version` sent from the memory of the trainer at `trainer_url`; seconds per phase."""
        body = {"trainer_url": trainer_url, "version": version, "force": force}
        return await self._change(ENGINE_RECEIVE_WEIGHTS, version, body)

    async def sleep(self) -> None:
        """Have the engine give its GPUs' memory up, until the next hand-over; one that sleeps already sleeps on."""
        answer = await self._json("POST", ENGINE_SLEEP, self._update_timeout, {})
        if not isinstance(answer, dict) or answer.get("asleep") is not True:
            raise EngineError(f"{self.base_url}{ENGINE_SLEEP} answered something else than sleep")

    async def ready(self) -> Readiness:
        """Whether the server may get requests; a server that does not answer raises `EngineUnavailableError`."""
        answer = await self._json("GET", ENGINE_READY, self._control_timeout, accept=(200, 503))
        if not isinstance(answer, dict) or not isinstance(answer.get("ready"), bool):
            raise EngineError(f"{self.base_url}{ENGINE_READY} answered something else than readiness", 503)
        return Readiness(answer["ready"], answer.get("reason"), answer.get("weight_version"))

    async def status(self) -> dict[str, Any]:
        """Weight version, path, liveness and fault, as the server tells them."""
        answer = await self._json("GET", ENGINE_STATUS, self._control_timeout)
        if not isinstance(answer, dict):
            raise EngineError(f"{self.base_url}{ENGINE_STATUS} answered something else than a status")
        return dict(answer)

    async def metrics(self) -> EngineMetrics:
        """Requests running and waiting, and the use of the KV cache."""
        _, text = await self._request("GET", ENGINE_METRICS, self._control_timeout, None)
        return parse_metrics(text)

    async def _change(self, path: str, version: int, body: Mapping[str, Any]) -> dict[str, float]:
        answer = await self._json("POST", path, self._update_timeout, body)
        if not isinstance(answer, dict) or not isinstance(answer.get("seconds"), dict):
            raise EngineError(f"{self.base_url}{path} answered something else than an update")
        self._adapters.pop(str(version), None)
        if answer.get("model") is not None:
            self._adapters[str(version)] = answer["model"]
            for old in list(self._adapters)[:-KNOWN_ADAPTERS]:
                del self._adapters[old]
        return dict(answer["seconds"])

    async def _json(
        self,
        method: str,
        path: str,
        timeout: float,
        body: Mapping[str, Any] | None = None,
        accept: Sequence[int] = (200,),
    ) -> Any:
        status, text = await self._request(method, path, timeout, body)
        if status not in accept:
            raise EngineError(f"{self.base_url}{path} answered {status}: {_message(text)}", status)
        try:
            return json.loads(text)
        except ValueError:
            raise EngineError(f"{self.base_url}{path} answered {status} without JSON", status) from None

    async def _request(self, method: str, path: str, timeout: float, body: Mapping[str, Any] | None) -> tuple[int, str]:
        if self._closed:
            raise EngineUnavailableError(f"{self.base_url}{path}: the connection to this engine is closed")
        if self._session is None:
            # No limit: the dispatcher decides how many requests are in flight, a second queue here would hide them.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        deadline = aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout)
        try:
            async with self._session.request(method, self.base_url + path, json=body, timeout=deadline) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailableError(f"{self.base_url}{path}: {error or type(error).__name__}") from error
        except TimeoutError as error:
            raise EngineUnavailableError(f"{self.base_url}{path}: no answer within {timeout:g} s") from error
        except RuntimeError as error:
            if (
                not self._closed
            ):  # aiohttp says so where the session was closed under a request that it was about to repeat
                raise
            raise EngineUnavailableError(f"{self.base_url}{path}: the connection to this engine is closed") from error


def parse_completions(answer: Any, n: int, adapter: Adapter | None = None) -> list[Completion]:
    """Completions of an answer of `/inference/v1/generate`; raises `EngineError` unless every token is accounted for.

    Args:
        answer: the JSON document.
        n: how many continuations were asked for.
        adapter: the one that was asked for; its version is that of all tokens. Default: the engine says it per token.
    """
    try:
        if adapter is not None and answer["model"] != adapter.name:
            raise EngineError(f"{answer['model']} answered a request for {adapter.name}")
        choices = answer["choices"]
        if len(choices) != n:
            raise EngineError(f"the engine returned {len(choices)} completions instead of {n}")
        return [_completion(choice, adapter) for choice in sorted(choices, key=lambda c: c["index"])]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise EngineError(f"the engine's answer lacks a field: {error!r}") from None


def _completion(choice: Mapping[str, Any], adapter: Adapter | None) -> Completion:
    token_ids = [int(token) for token in choice["token_ids"]]
    entries = choice["logprobs"]["content"] if token_ids else []
    if len(entries) != len(token_ids):
        raise EngineError(f"{len(entries)} log-probs for {len(token_ids)} tokens")
    logprobs = [float(entry["logprob"]) for entry in entries]
    if any(entry["token_id"] != token for entry, token in zip(entries, token_ids, strict=True)):
        raise EngineError("log-probs belong to other tokens than those sampled")
    # -9999 stands for minus infinity in vLLM's answers: a token that could not have been sampled.
    if any(not -9999.0 < value <= 1e-3 for value in logprobs):
        raise EngineError("a sampled token has no finite log-prob")
    finish = choice["finish_reason"]
    if not isinstance(finish, str) or finish in ("abort", "error"):
        raise EngineError(f"the engine did not finish the request: finish_reason is {finish!r}")
    if adapter is not None:
        versions = [adapter.version] * len(token_ids)
    else:
        versions = expand_versions(choice["weight_versions"] or [], len(token_ids))
    return Completion(token_ids, logprobs, versions, finish)


def expand_versions(spans: Sequence[Mapping[str, Any]], length: int) -> list[int]:
    """One version per token from spans `{version, start, end}` that cover `[0, length)` without gap or overlap."""
    versions: list[int] = []
    for span in spans:
        label, start, end = span["version"], span["start"], span["end"]
        if start != len(versions) or end <= start:
            raise EngineError(f"version spans do not cover the tokens: {list(spans)}")
        if not (isinstance(label, str) and label.isascii() and label.isdigit()):
            raise EngineError(f"tokens were sampled by weights of no known version ({label!r})")
        versions += [int(label)] * (end - start)
    if len(versions) != length:
        raise EngineError(f"versions are known for {len(versions)} of {length} tokens")
    return versions


def parse_metrics(text: str) -> EngineMetrics:
    """Load from vLLM's Prometheus text; a missing metric is an `EngineError`, not an idle engine. Preemptions may be missing."""
    values: dict[str, list[float]] = {}
    try:
        for line in text.splitlines():
            if line.startswith("vllm:"):
                name = line.partition("{")[0].partition(" ")[0]
                if name in _LOAD:
                    values.setdefault(name, []).append(float(line.rpartition(" ")[2]))
        preemptions = values.get("vllm:num_preemptions_total")
        return EngineMetrics(
            running=int(sum(values["vllm:num_requests_running"])),
            waiting=int(sum(values["vllm:num_requests_waiting"])),
            kv_usage=max(values["vllm:kv_cache_usage_perc"]),
            preemptions=None if preemptions is None else int(sum(preemptions)),
        )
    except KeyError as error:
        raise EngineError(f"/metrics lacks {error}") from None
    except (ValueError, OverflowError) as error:
        raise EngineError(f"/metrics has a value that is no number: {error}") from None


def _message(text: str) -> str:
    """The message of an error body of ours, of vLLM's or of FastAPI's."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:500] or "nothing"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
    return json.dumps(body)[:500]
