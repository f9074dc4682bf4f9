"""Hand-over of LoRA adapters: a new version is loaded in addition to the older ones, and the engine is never paused.

vLLM pauses, reloads and labels the engine as a whole. An adapter is loaded between two engine steps; each request names its adapter and
keeps it until it ends. Invariants:

- A name is never reused. vLLM compares adapters by name and caches prefixes by name and path, so a request never uses the keys or weights
  of another adapter.
- An adapter is unloaded only if no request needs it. With too many adapters vLLM evicts the least recently used one and later reads it from
  disk in the middle of a step; if retention has deleted the folder, the engine dies. Therefore a version is refused before that limit.
- Adapters of several runs (`trainer.sharedWith`) coexist like versions of one run. Each run has its own versions, and a load for one run
  does not unload adapters of another run, unless the engine is full of adapters of runs that have left.
- The engine's own label stays at its initial value, which is not a version: output of the base model is never used for training.
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
from rlrun.inference.engine_settings import MAX_LOADED_LORAS
from rlrun.inference.weights.handover import (
    Engine,
    Handover,
    HandoverError,
    HandoverOptions,
    Outcome,
    Served,
    Source,
    last_line,
)
from rlrun.inference.weights.preflight import FolderError, check_adapter, resolve_folder
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
    """Adapter registry and limits of one server."""

    served_name: str
    """Name of the model; adapters are named after it and their folder."""
    registry: MutableMapping[str, Any]
    """Model names that vLLM's server accepts, with their request objects."""
    in_use: Callable[[], set[str]]
    """Return the adapter names of requests in flight."""
    make_request: Callable[[str, int, str], Any]
    """Create vLLM's request object from name, number and path."""
    max_rank: int
    """Maximum rank that the engine supports."""
    runs: int = 1
    """Number of runs with adapters at the same time. If it is greater than 1, `weights_dir` contains the folders of all runs."""


class AdapterHandover(Handover):
    """Only writer of the engine's adapters."""

    def __init__(
        self,
        engine: LoRAEngine,
        server: AdapterServer,
        options: HandoverOptions,
        *,
        sleeper: Sleeper | None = None,
    ) -> None:
        """Create the hand-over; see `Handover`. `server` is the registry of the adapters."""
        super().__init__(engine, options, sleeper=sleeper)
        self._loras = engine
        self._server = server
        self._loaded: dict[str, _Loaded] = {}
        """Every adapter that the engine may have loaded, by name, in the order of loading."""
        self._newest: dict[str, Served] = {}
        """Newest adapter of each run."""
        self._previous: dict[str, str | None] = {}
        """Previous adapter of each run."""
        self._count = 0

    async def reload_base(self, version: int, *, force: bool = False) -> Outcome:
        """Raise `HandoverError`: every version is an adapter, also the first."""
        raise HandoverError(
            400, "this server loads only adapters of its base model; send the folder of an adapter to update_weights"
        )

    def _check_folder(self, path: str) -> Path:
        return check_adapter(path, self._options.weights_dir, self._options.expected, self._server.max_rank)

    def is_of(self, path: str, run: str) -> bool:
        """Return whether a published folder is below the guest's own folder."""
        if self._server.runs == 1:
            return False
        try:
            return resolve_folder(path, self._options.weights_dir).is_relative_to(
                resolve_folder(run, self._options.weights_dir)
            )
        except FolderError:
            return False

    def holds_for(self, run: str, model: str | None) -> bool:
        """Return whether an adapter with this name is loaded and belongs to the guest."""
        loaded = None if model is None else self._loaded.get(model)
        return loaded is not None and loaded.run == run

    def _run_of(self, source: str) -> str:
        if self._server.runs == 1:
            return self._server.served_name
        return Path(source).relative_to(Path(self._options.weights_dir).resolve()).parts[0]

    def _replaced_weights(self, source: str) -> Served | None:
        return self._newest.get(self._run_of(source))

    async def _load_weights(self, source: Source, version: int, *, keep_cache: bool) -> Outcome:
        began, run, folder = time.monotonic(), self._run_of(source.name), source.name
        await self._wake_engine()
        await self._unload_unused(run)
        if len(self._loaded) >= MAX_LOADED_LORAS * self._server.runs:
            # The order of `_newest` puts the run with the oldest hand-over first.
            for left in [other for other in self._newest if other != run]:
                self._forget_run(left)
                await self._unload_unused(left)
                if len(self._loaded) < MAX_LOADED_LORAS * self._server.runs:
                    break
        mine = sum(loaded.run == run for loaded in self._loaded.values())
        if mine >= MAX_LOADED_LORAS:
            raise HandoverError(
                503,
                f"requests in flight use {mine} adapters, which is the maximum; retry version {version} after one of them ends",
            )
        # Register the adapter before the call: if the call times out but the engine still loads it, it is unloaded later.
        self._count += 1
        name = f"{run}-{Path(folder).name}"
        if name in self._server.registry:
            name = f"{name}-{self._count}"
        self._loaded[name] = _Loaded(self._count, run)
        request = self._server.make_request(name, self._count, folder)
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._loras.add_lora(request)
        except Exception as error:  # if the engine still loads it, the next hand-over unloads it
            reason = self._failure_reason(error)
            raise HandoverError(500, f"update to version {version} failed while loading {folder}: {reason}") from None
        self._server.registry[name] = request
        before = self._newest.pop(run, None)  # inserted again below, as the last entry
        self._previous[run] = before.model if before is not None else None
        self.served = self._newest[run] = Served(version, folder, name)
        seconds = round(time.monotonic() - began, 4)
        return Outcome(version, changed=True, seconds={"load": seconds, "total": seconds}, model=name)

    async def _wake_engine(self) -> None:
        """Wake a sleeping engine with its kept base model, before the adapter is loaded; no request uses it until then."""
        if self._sleeper is None or not self._sleeper.asleep:
            return
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._sleeper.wake_weights()
                reach("turn.engine_half_awake")
                await self._sleeper.wake_cache()
        except Exception as error:
            self._stop_server(f"the engine could not wake up, so the server stops: {self._failure_reason(error)}")

    def _forget_run(self, run: str) -> None:
        self._newest.pop(run)
        self._previous.pop(run)

    async def _unload_unused(self, run: str) -> None:
        """Unload adapters of a run, except the newest, the previous (requests may be on their way to it), and those in use."""
        newest = self._newest.get(run)
        kept = {self._previous.get(run), newest.model if newest is not None else None, *self._server.in_use()}
        mine = [name for name, loaded in self._loaded.items() if loaded.run == run]
        for name in [name for name in mine if name not in kept]:
            self._server.registry.pop(name, None)
            try:
                async with asyncio.timeout(self._options.timeout):
                    await self._loras.remove_lora(self._loaded[name].number)
            except Exception as error:
                logger.warning("adapter {} could not be unloaded: {}", name, last_line(error))
                continue
            del self._loaded[name]
