"""Checked answers of an engine to token requests: every token has a log-prob and a policy version, or the answer is an error.

Two forms: packed columns of our own route (`rlrun.protocol.messages.packed`), and the JSON of vLLM's own one. Knows neither vLLM nor
torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rlrun.protocol.messages.packed import FLOATS, INTEGERS, PackedError, Reader, integer_column

LOWEST_LOGPROB, HIGHEST_LOGPROB = -9999.0, 1e-3
"""-9999 stands for minus infinity in vLLM's answers: a token that could not have been sampled. Above 0 is rounding."""

Span = Mapping[str, Any]
"""Tokens of one policy version, `{version, start, end}`, as an engine wrote it."""


class EngineError(Exception):
    """The server refused, failed, or answered something that must not be trained on."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineUnavailableError(EngineError):
    """No answer: connection refused or broken, or a deadline passed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation; the three columns have one entry per token. Of an engine they are `array`s: 4 bytes an entry."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural logarithms, after temperature and top-p: of what was sampled from."""
    versions: Sequence[int]
    """The policy version that sampled the token."""
    finish_reason: str


class ParsedReply(NamedTuple):
    """A reply as the engine's parsers take it apart.

    Attributes:
        content: the text without calls and thoughts.
        calls: (name, arguments as JSON) in order.
        reasoning: the thoughts; None: there are none.
    """

    content: str
    calls: list[tuple[str, str]]
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A policy version that the engine holds as an adapter of this name."""

    name: str
    version: int


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Choice(msgspec.Struct):
    """Choice in vLLM's JSON; one type per field keeps the decoder from building a dictionary per token."""

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
    """Completions of an answer of `/inference/v1/generate`; raises `EngineError` unless every token is accounted for.

    Args:
        text: the JSON document.
        n: how many continuations were asked for.
        adapter: the one that was asked for; its version is that of all tokens. Default: the engine says it per token.
    """
    try:
        answer = _STOCK.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EngineError(f"the engine's answer lacks a field: {error}") from None
    _check_answer(len(answer.choices), n, answer.model, adapter)
    return [_stock_completion(choice, adapter) for choice in sorted(answer.choices, key=lambda choice: choice.index)]


def parse_packed(data: bytes, n: int, adapter: Adapter | None = None) -> list[Completion]:
    """The same of an answer of `/rlrun/generate`.

    Args:
        data: `{model, choices: [{tokens, finish_reason, weight_versions}]}`, then of each choice its token ids and its log-probs.
        n: see `parse_stock`.
        adapter: see `parse_stock`.
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
            completions.append(_check_completion(token_ids, logprobs, spans, choice["finish_reason"], adapter))
        reader.end()
        return completions
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
        raise EngineError("the engine's answer lacks a field: a token id is no 32-bit integer") from None
    logprobs = array(FLOATS, [entry.logprob for entry in entries])
    return _check_completion(token_ids, logprobs, choice.weight_versions or [], choice.finish_reason, adapter)


def _check_completion(
    token_ids: array[int],
    logprobs: array[float],
    spans: Sequence[Span],
    finish: object,
    adapter: Adapter | None,
) -> Completion:
    """A completion that may be trained on."""
    values = np.frombuffer(logprobs, np.float32)
    # NaN compares as false.
    if not bool(((values > LOWEST_LOGPROB) & (values <= HIGHEST_LOGPROB)).all()):
        raise EngineError("a sampled token has no finite log-prob")
    if not isinstance(finish, str) or finish in ("abort", "error"):
        raise EngineError(f"the engine did not finish the request: finish_reason is {finish!r}")
    if adapter is not None:
        return Completion(token_ids, logprobs, integer_column([adapter.version]) * len(token_ids), finish)
    return Completion(token_ids, logprobs, expand_versions(spans, len(token_ids)), finish)


def expand_versions(spans: Sequence[Span], length: int) -> array[int]:
    """One version per token from spans `{version, start, end}` that cover `[0, length)` without gap or overlap."""
    versions = integer_column([])
    try:
        for span in spans:
            label, start, end = span["version"], span["start"], span["end"]
            if start != len(versions) or not start < end <= length:
                raise EngineError(f"version spans do not cover the tokens: {list(spans)}")
            if not (isinstance(label, str) and label.isascii() and label.isdigit()):
                raise EngineError(f"tokens were sampled by weights of no known version ({label!r})")
            versions.extend(integer_column([int(label)]) * (end - start))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the engine's answer lacks a field: {error!r}") from None
    if len(versions) != length:
        raise EngineError(f"versions are known for {len(versions)} of {length} tokens")
    return versions
