"""The hand-over of adapters: a new version is loaded beside the older ones, and the engine is never paused.

vLLM pauses, reloads and labels the engine as a whole. An adapter needs none of that: it is loaded between two engine steps, requests name
the one they want, and one in flight keeps its own to the end. Invariants:

- A name is never used twice. vLLM compares adapters by name and caches prefixes by name and path, so no request ever meets another
  adapter's keys or weights.
- An adapter is unloaded only when no request needs it. vLLM forgets the least recently used one when it has too many and reads it from disk
  again in the middle of a step, where a folder that retention has deleted ends the engine; so a version is refused before that.
- The engine's own label stays what it is after the start, which is no version: what the bare model answers is never trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol

from loguru import logger

from rlrun.inference.command import MAX_LOADED_LORAS
from rlrun.inference.handover import Engine, Handover, HandoverError, Outcome, Served, last_line
from rlrun.inference.preflight import Shapes, check_adapter


class LoRAEngine(Engine, Protocol):
    """The part of vLLM's engine client that adapters need."""

    async def add_lora(self, lora_request: Any) -> bool: ...
    async def remove_lora(self, lora_id: int) -> bool: ...


class AdapterHandover(Handover):
    """The one writer of the engine's adapters."""

    def __init__(
        self,
        engine: LoRAEngine,
        *,
        served_name: str,
        registry: MutableMapping[str, Any],
        in_use: Callable[[], set[str]],
        make_request: Callable[[str, int, str], Any],
        max_rank: int,
        base_model: str,
        weights_dir: str,
        expected: Shapes | None,
        timeout: float,
        on_broken: Callable[[], None],
    ) -> None:
        """As `Handover`, and:

        Args:
            served_name: of the model; adapters are named after it and their folder.
            registry: the names that vLLM's server accepts, each with its request object.
            in_use: names that requests in flight have.
            make_request: vLLM's request object from name, number and path.
            max_rank: highest rank that the engine takes.
        """
        super().__init__(
            engine,
            base_model=base_model,
            weights_dir=weights_dir,
            expected=expected,
            timeout=timeout,
            on_broken=on_broken,
        )
        self._loras = engine
        self._served_name, self._max_rank = served_name, max_rank
        self._registry, self._in_use, self._make_request = registry, in_use, make_request
        self._loaded: dict[str, int] = {}
        """Number of every adapter that the engine may hold, by name, in the order of loading."""
        self._previous: str | None = None
        self._count = 0

    async def reload_base(self, version: int, *, force: bool = False) -> Outcome:
        """Refused: every version is an adapter, the first one too."""
        raise HandoverError(400, "this server's versions are adapters of the model it started with; hand one over")

    def _check(self, path: str) -> Path:
        return check_adapter(path, self._weights_dir, self._expected, self._max_rank)

    async def _load(self, source: str, version: int, *, keep_cache: bool) -> Outcome:
        began = time.monotonic()
        await self._unload_unused()
        if len(self._loaded) >= MAX_LOADED_LORAS:
            raise HandoverError(
                503,
                f"requests in flight need {len(self._loaded)} adapters; version {version} has to wait for one of them",
            )
        self._count += 1
        name = f"{self._served_name}-{Path(source).name}"
        if name in self._registry:
            name = f"{name}-{self._count}"
        self._loaded[name] = self._count
        request = self._make_request(name, self._count, source)
        try:
            async with asyncio.timeout(self._timeout):
                await self._loras.add_lora(request)
        except Exception as error:  # should the engine load it after all, the next hand-over unloads it
            reason = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else last_line(error)
            raise HandoverError(500, f"update to version {version} failed while loading {source}: {reason}") from None
        self._registry[name] = request
        self._previous = self.served.model if self.served is not None else None
        self.served = Served(version, source, name)
        seconds = round(time.monotonic() - began, 4)
        return Outcome(version, changed=True, seconds={"load": seconds, "total": seconds}, model=name)

    async def _unload_unused(self) -> None:
        """Unload all but the newest, what requests in flight need, and the one before: a request may be on its way to it."""
        kept = {self._previous, self.served.model if self.served is not None else None, *self._in_use()}
        for name in [name for name in self._loaded if name not in kept]:
            self._registry.pop(name, None)
            try:
                async with asyncio.timeout(self._timeout):
                    await self._loras.remove_lora(self._loaded[name])
            except Exception as error:
                logger.warning("adapter {} could not be unloaded: {}", name, last_line(error))
                continue
            del self._loaded[name]
