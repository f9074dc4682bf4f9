"""An engine that shares its GPUs with the trainer: it gives its memory up for a step, and takes it back before it gets new weights.

vLLM's sleep mode does the work: weights leave the GPU (level 1: to the host's memory; level 2: for nothing, as the next hand-over loads
all of them), the KV cache is dropped, and what was asked is aborted. On CPUs vLLM has nothing to give up; all else is the same there, so
that the order of things can be tried on any machine. Invariants:

- From the first moment of falling asleep to the end of waking, no request reaches the engine: it is refused with 503.
- An engine wakes within a hand-over alone: weights first, then the new version, then the KV cache. So there is no engine that is awake
  without weights, and nothing that a caller's death can leave half-way.
- An engine that cannot be put to sleep, or be woken, has memory that nobody can account for: the server ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlrun.inference.guard import App, Receive, Scope, Send, answer_unread
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE, ENGINE_GENERATE_PACKED

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of vLLM's sleep."""
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
    """The part of vLLM's engine client that sleeps."""

    async def sleep(self, level: int = ..., mode: object = ...) -> None: ...
    async def wake_up(self, tags: list[str] | None = ...) -> bool: ...


class Sleeper:
    """One engine's sleep. The hand-over alone calls it, one call at a time.

    Args:
        engine: that sleeps.
        level: `DROP_WEIGHTS` where each hand-over brings all weights, else `KEEP_WEIGHTS`.
    """

    def __init__(self, engine: SleepingEngine, *, level: int) -> None:
        self._engine, self._level = engine, level
        self.asleep = False
        """True while requests are refused: the engine sleeps, falls asleep, or is waking."""

    async def sleep(self) -> None:
        """Abort what is asked, and give the memory up."""
        self.asleep = True
        await self._engine.sleep(level=self._level, mode="abort")

    async def wake_weights(self) -> None:
        """Take back the memory of the weights. What it holds is to be loaded next, unless the weights were kept."""
        await self._engine.wake_up(tags=[_WEIGHTS])

    async def wake_cache(self) -> None:
        """Take back the memory of the KV cache: from now on the engine answers."""
        await self._engine.wake_up(tags=[_CACHE])
        self.asleep = False


class SleepGate:
    """ASGI middleware, inside the guard: a sleeping engine refuses what it would have to compute.

    Args:
        app: the server.
        asleep: whether the engine sleeps.
    """

    def __init__(self, app: App, asleep: Callable[[], bool]) -> None:
        self.app, self._asleep = app, asleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in COMPUTING and self._asleep():
            await answer_unread(send, 503, "the engine sleeps: the trainer has its GPUs")
        else:
            await self.app(scope, receive, send)
