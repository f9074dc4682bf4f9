"""Route `/rlrun/generate` of an engine: tokens in and out as packed columns (`rlrun.protocol.messages.packed_columns`).

vLLM's own route builds an object and 90 bytes of JSON per token, which takes seconds of its event loop for a group of long rollouts; this
route only copies arrays.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlrun.inference.guard import GUEST
from rlrun.protocol.files.routes import Routes, describe_routes, routes_bytes
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE_PACKED
from rlrun.protocol.messages.packed_columns import INTEGERS, MEDIA_TYPE, Column, PackedError, Reader, pack_document

CLIENT_GONE = 499
GONE = 410
"""Status for an unknown adapter. Never 403, 404 or 405: clients read them as a missing route."""
_T = TypeVar("_T")


class Sampling(BaseModel):
    """Sampling parameters with vLLM's names."""

    model_config = ConfigDict(extra="forbid")
    n: int = Field(1, ge=1, le=4096)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    min_tokens: int = Field(0, ge=0)
    stop: list[str] = []
    routed_experts_prompt_start: int | None = Field(None, ge=0)
    """Return the experts of the tokens from this position on. Default: no experts."""


class Head(BaseModel):
    """Head of a packed request; its single column is the prompt."""

    model_config = ConfigDict(extra="forbid")
    tokens: int = Field(ge=1)
    sampling_params: Sampling
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=256)
    model: str | None = None
    """Name of an adapter. Default: the served model."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One continuation of T tokens.

    Attributes:
        token_ids: `[T]` int32.
        logprobs: `[T]` float32.
        versions: triples (label, start, end): the weights that sampled the tokens `start` to `end`.
        finish_reason: vLLM's reason for the end.
        routes: experts of the tokens from `routed_experts_prompt_start` on, without the last token; None if they were not requested.
    """

    token_ids: array[int]
    logprobs: array[float]
    versions: Sequence[tuple[str, int, int]]
    finish_reason: str
    routes: Routes | None = None


class GenerateError(Exception):
    """Error for a request that cannot be answered.

    Args:
        message: cause.
        status: HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TokenEngine(Protocol):
    """Engine that samples tokens."""

    async def sample_tokens(self, head: Head, prompt: array[int]) -> tuple[str, list[SampledTokens]]:
        """Return the name of the model, and `n` continuations in order. Cancelled if the client disconnects.

        Raises:
            GenerateError: the request is invalid, or the engine failed.
        """


def generate_router(engine: TokenEngine) -> APIRouter:
    """Return a router whose route samples from `engine`."""
    router = APIRouter()

    @router.post(ENGINE_GENERATE_PACKED)
    async def generate(request: Request) -> Response:
        """Answer a packed request with a packed response."""
        try:
            head, prompt = _read_request(await request.body())
            _check_owner(request, head.model)
            answer = await unless_gone(request, lambda: engine.sample_tokens(head, prompt))
        except GenerateError as error:
            body = {"error": {"code": error.status, "message": str(error)}}
            return JSONResponse(body, status_code=error.status)
        if answer is None:
            return Response(status_code=CLIENT_GONE)
        return Response(_packed_answer(*answer), media_type=MEDIA_TYPE)

    return router


def _check_owner(request: Request, model: str | None) -> None:
    """Refuse adapters of other runs for a guest, with the same message as for unknown adapters."""
    guest = request.scope.get(GUEST)
    if guest is not None and not request.app.state.rlrun.handover.holds_for(guest, model):
        raise GenerateError(f"run {guest} has no model {model} here", GONE)


def _read_request(data: bytes) -> tuple[Head, array[int]]:
    try:
        reader = Reader(data)
        head = Head.model_validate(reader.head)
        prompt = reader.column(INTEGERS, head.tokens)
        reader.end()
    except PackedError as error:
        raise GenerateError(f"the body is not a packed document: {error}", 400) from None
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        message = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in found)
        raise GenerateError(message, 422) from None
    if min(prompt) < 0:
        raise GenerateError(f"the prompt has a negative token id: {min(prompt)}", 422)
    return head, prompt


def _packed_answer(model: str, sampled: Sequence[SampledTokens]) -> bytes:
    choices: list[dict[str, object]] = []
    columns: list[Column | bytes] = []
    for one in sampled:
        spans = [{"version": label, "start": start, "end": end} for label, start, end in one.versions]
        choice: dict[str, object] = {
            "tokens": len(one.token_ids),
            "finish_reason": one.finish_reason,
            "weight_versions": spans,
        }
        columns += [one.token_ids, one.logprobs]
        if one.routes is not None:
            choice["routes"] = describe_routes(one.routes)
            columns.append(routes_bytes(one.routes))
        choices.append(choice)
    return pack_document({"model": model, "choices": choices}, columns)


async def unless_gone(request: Request, work: Callable[[], Coroutine[object, object, _T]]) -> _T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects. Call it after the body was read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
