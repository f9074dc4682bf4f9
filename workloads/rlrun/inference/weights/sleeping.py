"""Sleep of an engine that shares its GPUs with the trainer: it frees its memory for a step and allocates it again before new weights load.

Uses vLLM's sleep mode: the weights leave the GPU (level 1: copied to host memory; level 2: discarded, because the next hand-over loads all
of them), the KV cache is dropped, and running requests are aborted. On CPU vLLM frees nothing; everything else is the same, so the order
of operations can be tested on any machine. Invariants:

- From the start of sleeping to the end of waking, no request reaches the engine; requests are refused with 503.
- An engine wakes only within a hand-over: first weights, then the new version, then the KV cache. So an engine is never awake without
  weights, and the death of a caller cannot leave it half-awake.
- If an engine fails to sleep or to wake, the state of its memory is unknown, so the server ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlrun.inference.guard import App, Receive, Scope, Send, answer_unread
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE, ENGINE_GENERATE_PACKED

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of vLLM's sleep mode."""
_WEIGHTS, _CACHE = "weights", "kv_cache"

COMPUTING = frozenset(
    {
        ENGINE_GENERATE,
        ENGINE_GENERATE_PACKED,
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/messages",
        "/v1/responses",
    }
)
"""Routes that need the engine's memory."""


class SleepingEngine(Protocol):
    """The part of vLLM's engine client that controls sleep."""

    async def sleep(self, level: int = ..., mode: object = ...) -> None: ...
    async def wake_up(self, tags: list[str] | None = ...) -> bool: ...


class Sleeper:
    """Sleep control of one engine. Only the hand-over calls it, one call at a time.

    Args:
        engine: vLLM's engine client.
        level: `DROP_WEIGHTS` if each hand-over brings all weights, otherwise `KEEP_WEIGHTS`.
    """

    def __init__(self, engine: SleepingEngine, *, level: int) -> None:
        self._engine, self._level = engine, level
        self.asleep = False
        """Whether requests are refused: the engine sleeps, is falling asleep, or is waking."""

    async def sleep(self) -> None:
        """Abort running requests and free the memory."""
        self.asleep = True
        await self._engine.sleep(level=self._level, mode="abort")

    async def wake_weights(self) -> None:
        """Allocate the memory of the weights. Its content must be loaded next, unless the weights were kept."""
        await self._engine.wake_up(tags=[_WEIGHTS])

    async def wake_cache(self) -> None:
        """Allocate the memory of the KV cache; afterwards the engine accepts requests."""
        await self._engine.wake_up(tags=[_CACHE])
        self.asleep = False


class SleepGate:
    """ASGI middleware inside the guard that refuses computing requests while the engine sleeps.

    Args:
        app: wrapped server.
        asleep: function that returns whether the engine sleeps.
    """

    def __init__(self, app: App, asleep: Callable[[], bool]) -> None:
        self.app, self._asleep = app, asleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in COMPUTING and self._asleep():
            await answer_unread(
                send, 503, "the engine sleeps because the trainer uses its GPUs; retry after the next weight update"
            )
        else:
            await self.app(scope, receive, send)
