"""Validated answers of an engine to token requests, and its load.

Every token has a log-prob and a policy version; otherwise the answer is an error. There are two formats: packed columns of RLRun's route
(`rlrun.protocol.messages.packed_columns`), and the JSON of vLLM's own route. The load is parsed from vLLM's Prometheus metrics. This module
imports neither vLLM nor torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rlrun.protocol.files.routes import EngineRoutes, RoutesError, described_size, read_routes
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS, PackedError, Reader, integer_column

LOWEST_LOGPROB, HIGHEST_LOGPROB = -9999.0, 1e-3
"""Valid range of log-probs. vLLM reports -9999 for minus infinity, a token that cannot be sampled. Values above 0 come from rounding."""

Span = Mapping[str, Any]
"""Tokens of one policy version: `{version, start, end}`, as the engine sends it."""


class EngineError(Exception):
    """Error for a request that the server refused, failed, or answered with data that must not be used for training."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineUnavailableError(EngineError):
    """Error for a missing response: the connection was refused or broke, or the deadline passed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of T tokens. The three columns have length T; engines return `array`s with 4 bytes per entry."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """`[T]` natural logarithms of the distribution that was sampled from, after temperature and top-p."""
    versions: Sequence[int]
    """`[T]` policy versions that sampled the tokens."""
    finish_reason: str
    routes: EngineRoutes | None = None
    """Experts of the tokens from the requested position on. None: not requested, or the server does not return them."""


class ParsedReply(NamedTuple):
    """Reply after parsing by the engine.

    Attributes:
        content: text without tool calls and reasoning.
        calls: pairs (function name, arguments as JSON) in order.
        reasoning: text of the reasoning, or None.
    """

    content: str
    calls: list[tuple[str, str]]
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Policy version that the engine serves as a LoRA adapter with this name."""

    name: str
    version: int


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Choice(msgspec.Struct):
    """Choice in vLLM's JSON. Typed fields keep the decoder from building one dictionary per token."""

    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _Logprobs | None = None
    weight_versions: list[dict[str, Any]] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None


_STOCK = msgspec.json.Decoder(_Answer)


def parse_stock(text: bytes, n: int, adapter: Adapter | None = None) -> list[Completion]:
    """Parse a response of `/inference/v1/generate`. Raises `EngineError` unless every token has a log-prob and a version.

    Args:
        text: JSON document.
        n: number of requested continuations.
        adapter: requested adapter, whose version applies to all tokens. Default: the engine reports the version per token.
    """
    try:
        answer = _STOCK.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EngineError(f"the engine's answer lacks a field: {error}") from None
    _check_answer(len(answer.choices), n, answer.model, adapter)
    return [_stock_completion(choice, adapter) for choice in sorted(answer.choices, key=lambda choice: choice.index)]


def parse_packed(
    data: bytes, n: int, adapter: Adapter | None = None, *, routes_start: int | None = None
) -> list[Completion]:
    """Parse a response of `/rlrun/generate`. Raises `EngineError` unless every token has a log-prob and a version.

    Args:
        data: packed document with the head `{model, choices: [{tokens, finish_reason, weight_versions, routes}]}` and the columns of each
            choice: token ids, log-probs, and experts if it has `routes`.
        n: number of requested continuations.
        adapter: see `parse_stock`.
        routes_start: first position whose experts were requested. Default: none were requested.
    """
    try:
        reader = Reader(data)
        choices = reader.head["choices"]
        _check_answer(len(choices), n, reader.head["model"], adapter)
        completions = []
        for choice in choices:
            count = choice["tokens"]
            token_ids, logprobs = reader.column(INTEGERS, count), reader.column(FLOATS, count)
            spans = choice["weight_versions"]
            completion = _check_completion(token_ids, logprobs, spans, choice["finish_reason"], adapter)
            if routes_start is not None and (described := choice.get("routes")) is not None:
                experts = read_routes(described, reader.raw(described_size(described)))
                completion = replace(completion, routes=EngineRoutes(routes_start, experts))
            completions.append(completion)
        reader.end()
        return completions
    except RoutesError as error:
        raise EngineError(f"the engine's answer has wrong experts: {error}") from None
    except (PackedError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"the engine's answer lacks a field: {error!r}") from None


def _check_answer(found: int, n: int, model: str | None, adapter: Adapter | None) -> None:
    if adapter is not None and model != adapter.name:
        raise EngineError(f"{model} answered a request for {adapter.name}")
    if found != n:
        raise EngineError(f"the engine returned {found} completions instead of {n}")


def _stock_completion(choice: _Choice, adapter: Adapter | None) -> Completion:
    if choice.logprobs is None and choice.token_ids:
        raise EngineError("the engine's answer lacks a field: logprobs")
    entries = choice.logprobs.content if choice.logprobs is not None else []
    if len(entries) != len(choice.token_ids):
        raise EngineError(f"{len(entries)} log-probs for {len(choice.token_ids)} tokens")
    if [entry.token_id for entry in entries] != choice.token_ids:
        raise EngineError("log-probs belong to other tokens than those sampled")
    try:
        token_ids = integer_column(choice.token_ids)
    except OverflowError:
        raise EngineError("the engine's answer lacks a field: a token id is not a 32-bit integer") from None
    logprobs = array(FLOATS, [entry.logprob for entry in entries])
    return _check_completion(token_ids, logprobs, choice.weight_versions or [], choice.finish_reason, adapter)


def _check_completion(
    token_ids: array[int],
    logprobs: array[float],
    spans: Sequence[Span],
    finish: object,
    adapter: Adapter | None,
) -> Completion:
    """Validate the columns and return a completion that can be used for training."""
    values = np.frombuffer(logprobs, np.float32)
    # A comparison with NaN is false, so this also refuses NaN.
    if not bool(((values > LOWEST_LOGPROB) & (values <= HIGHEST_LOGPROB)).all()):
        raise EngineError("a sampled token has no finite log-prob")
    if not isinstance(finish, str) or finish in ("abort", "error"):
        raise EngineError(f"the engine did not finish the request: finish_reason is {finish!r}")
    if adapter is not None:
        return Completion(token_ids, logprobs, integer_column([adapter.version]) * len(token_ids), finish)
    return Completion(token_ids, logprobs, expand_versions(spans, len(token_ids)), finish)


def expand_versions(spans: Sequence[Span], length: int) -> array[int]:
    """Expand spans `{version, start, end}`, which must cover `[0, length)` without gap or overlap, into one version per token."""
    versions = integer_column([])
    try:
        for span in spans:
            label, start, end = span["version"], span["start"], span["end"]
            if start != len(versions) or not start < end <= length:
                raise EngineError(f"version spans do not cover the tokens: {list(spans)}")
            if not (isinstance(label, str) and label.isascii() and label.isdigit()):
                raise EngineError(f"tokens were sampled by weights of an unknown version ({label!r})")
            versions.extend(integer_column([int(label)]) * (end - start))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the engine's answer lacks a field: {error!r}") from None
    if len(versions) != length:
        raise EngineError(f"versions are known for {len(versions)} of {length} tokens")
    return versions


_LOAD = frozenset(
    f"vllm:{name}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Load of one server, summed over its data-parallel engines."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction (0 to 1) of the KV cache in use, of the engine with the highest use."""
    preemptions: int | None = None
    """Preempted sequences since the server's start (KV cache full); None if the server does not report it."""


def parse_metrics(text: str) -> EngineMetrics:
    """Parse vLLM's Prometheus text. A missing load metric raises `EngineError` instead of reporting an idle engine."""
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
        raise EngineError(f"/metrics has a value that is not a number: {error}") from None
