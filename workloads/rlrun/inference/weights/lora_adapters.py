"""The hand-over of adapters: a new version is loaded beside the older ones, and the engine is never paused.

vLLM pauses, reloads and labels the engine as a whole. An adapter needs none of that: it is loaded between two engine steps, requests name
the one they want, and one in flight keeps its own to the end. Invariants:

- A name is never used twice. vLLM compares adapters by name and caches prefixes by name and path, so no request ever meets another
  adapter's keys or weights.
- An adapter is unloaded only when no request needs it. vLLM forgets the least recently used one when it has too many and reads it from disk
  again in the middle of a step, where a folder that retention has deleted ends the engine; so a version is refused before that.
- Adapters of several runs (`trainer.sharedWith`) are beside each other as versions of one are. Each run has versions of its own, and a
  load for one run unloads none of another's, unless the engine is full of those of runs that have left.
- The engine's own label stays what it is after the start, which is no version: what the bare model answers is never trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.inference.command import MAX_LOADED_LORAS
from rlrun.inference.weights.handover import Engine, Handover, HandoverError, Outcome, Served, Source, last_line
from rlrun.inference.weights.preflight import FolderError, Shapes, check_adapter, resolve_folder
from rlrun.inference.weights.sleeping import Sleeper


class LoRAEngine(Engine, Protocol):
    """The part of vLLM's engine client that adapters need."""

    async def add_lora(self, lora_request: Any) -> bool: ...
    async def remove_lora(self, lora_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    run: str


@dataclass(frozen=True, kw_only=True)
class AdapterServer:
    """The server's side of adapters: what they are called, and how many the engine takes."""

    served_name: str
    """Name of the model; adapters of its run are named after it and their folder."""
    registry: MutableMapping[str, Any]
    """The names that vLLM's server accepts, each with its request object."""
    in_use: Callable[[], set[str]]
    """Names that requests in flight have."""
    make_request: Callable[[str, int, str], Any]
    """vLLM's request object from name, number and path."""
    max_rank: int
    """Highest rank that the engine takes."""
    runs: int = 1
    """Runs that have adapters here at the same time. With more than one, `weights_dir` is the folder of all runs' folders."""


class AdapterHandover(Handover):
    """The one writer of the engine's adapters."""

    def __init__(
        self,
        engine: LoRAEngine,
        server: AdapterServer,
        *,
        base_model: str,
        weights_dir: str,
        expected: Shapes | None,
        timeout: float,
        on_broken: Callable[[], None],
        sleeper: Sleeper | None = None,
    ) -> None:
        """As `Handover`, with the server that the adapters are for."""
        super().__init__(
            engine,
            base_model=base_model,
            weights_dir=weights_dir,
            expected=expected,
            timeout=timeout,
            on_broken=on_broken,
            sleeper=sleeper,
        )
        self._loras = engine
        self._server = server
        self._loaded: dict[str, _Loaded] = {}
        """Every adapter that the engine may hold, by name, in the order of loading."""
        self._newest: dict[str, Served] = {}
        """Newest adapter of each run, which it serves."""
        self._previous: dict[str, str | None] = {}
        """The adapter before, of each run."""
        self._count = 0

    async def reload_base(self, version: int, *, force: bool = False) -> Outcome:
        """Refused: every version is an adapter, the first one too."""
        raise HandoverError(400, "this server's versions are adapters of the model it started with; hand one over")

    def _check(self, path: str) -> Path:
        return check_adapter(path, self._weights_dir, self._expected, self._server.max_rank)

    def is_of(self, path: str, run: str) -> bool:
        """True if a published folder is in the guest's own folder."""
        if self._server.runs == 1:
            return False
        try:
            return resolve_folder(path, self._weights_dir).is_relative_to(resolve_folder(run, self._weights_dir))
        except FolderError:
            return False

    def holds_for(self, run: str, model: str | None) -> bool:
        """True if an adapter of this name is held, and is the guest's."""
        loaded = None if model is None else self._loaded.get(model)
        return loaded is not None and loaded.run == run

    def _run_of(self, source: str) -> str:
        if self._server.runs == 1:
            return self._server.served_name
        return Path(source).relative_to(Path(self._weights_dir).resolve()).parts[0]

    def _held(self, source: str) -> Served | None:
        return self._newest.get(self._run_of(source))

    async def _load(self, source: Source, version: int, *, keep_cache: bool) -> Outcome:
        began, run, folder = time.monotonic(), self._run_of(source.name), source.name
        await self._wake()
        await self._unload_unused(run)
        if len(self._loaded) >= MAX_LOADED_LORAS * self._server.runs:
            for left in [
                other for other in self._newest if other != run
            ]:  # the one whose last hand-over is longest ago first
                self._forget(left)
                await self._unload_unused(left)
                if len(self._loaded) < MAX_LOADED_LORAS * self._server.runs:
                    break
        mine = sum(loaded.run == run for loaded in self._loaded.values())
        if mine >= MAX_LOADED_LORAS:
            raise HandoverError(
                503, f"requests in flight need {mine} adapters; version {version} has to wait for one of them"
            )
        self._count += 1
        name = f"{run}-{Path(folder).name}"
        if name in self._server.registry:
            name = f"{name}-{self._count}"
        self._loaded[name] = _Loaded(self._count, run)
        request = self._server.make_request(name, self._count, folder)
        try:
            async with asyncio.timeout(self._timeout):
                await self._loras.add_lora(request)
        except Exception as error:  # should the engine load it after all, the next hand-over unloads it
            reason = self._reason(error)
            raise HandoverError(500, f"update to version {version} failed while loading {folder}: {reason}") from None
        self._server.registry[name] = request
        before = self._newest.pop(run, None)  # and in again, as the latest
        self._previous[run] = before.model if before is not None else None
        self.served = self._newest[run] = Served(version, folder, name)
        seconds = round(time.monotonic() - began, 4)
        return Outcome(version, changed=True, seconds={"load": seconds, "total": seconds}, model=name)

    async def _wake(self) -> None:
        """Wake with the adapters' model, which was kept: it is served again before the adapter is there, and gets no request."""
        if self._sleeper is None or not self._sleeper.asleep:
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._sleeper.wake_weights()
                reach("turn.engine_half_awake")
                await self._sleeper.wake_cache()
        except Exception as error:
            self._break(f"the engine could not be woken, so the server stops: {self._reason(error)}")

    def _forget(self, run: str) -> None:
        self._newest.pop(run)
        self._previous.pop(run)

    async def _unload_unused(self, run: str) -> None:
        """Unload of one run all but the newest, what requests in flight need, and the one before: a request may be on its way to it."""
        newest = self._newest.get(run)
        kept = {self._previous.get(run), newest.model if newest is not None else None, *self._server.in_use()}
        mine = [name for name, loaded in self._loaded.items() if loaded.run == run]
        for name in [name for name in mine if name not in kept]:
            self._server.registry.pop(name, None)
            try:
                async with asyncio.timeout(self._timeout):
                    await self._loras.remove_lora(self._loaded[name].number)
            except Exception as error:
                logger.warning("adapter {} could not be unloaded: {}", name, last_line(error))
                continue
            del self._loaded[name]
