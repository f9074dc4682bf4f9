"""Weight hand-over: pause, reload, set the version and resume, as one operation inside the server.

One call instead of four from the orchestrator: an orchestrator that is killed between pause and resume cannot leave the engine paused.
Invariants:

- During an update the engine labels its output `UNKNOWN_VERSION`, and gets the new version only after a successful reload. After any
  failure, no token is reported with a version that did not sample it.
- A paused engine looks alive but serves no request, so it is resumed on every path except one: after a reload that failed half-way. One
  forward pass through half-loaded layers kills vLLM's engine, and it cannot load again. In this case `on_broken` is called, and the
  server ends so that it is replaced.
- A prefix that was cached with older weights is never used with newer weights: clients salt the cache with the version, and an update
  that does not increase the version (after a fallback of the run) resets the cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from loguru import logger

from rlrun.diagnostics.fault_points import reach
from rlrun.inference.weights.preflight import FolderError, Shapes, check_weights
from rlrun.inference.weights.receive import Receiver, RefusedError
from rlrun.inference.weights.sleeping import Sleeper
from rlrun.protocol.messages.buckets import is_delta

ResultT = TypeVar("ResultT")
UNKNOWN_VERSION = "unknown"
LOAD = "load_version"
"""Method of vLLM's workers, see `loading.Loading`."""
RESUME_TIMEOUT_SECONDS = 30.0
RESUME_RETRY_SECONDS = 0.2


class Rebuilds(Protocol):
    """Builder of versions from differences (implemented by `delta_folders.Rebuilder`, which needs numpy)."""

    def make(self, folder: Path) -> Path:
        """Return the folder with the whole version of a published difference."""
        ...

    def close(self) -> None:
        """Delete everything in shared memory."""
        ...


class Engine(Protocol):
    """The part of vLLM's engine client that a hand-over needs."""

    @property
    def errored(self) -> bool: ...
    async def pause_generation(self, *, mode: object = ..., clear_cache: bool = ...) -> None: ...
    async def resume_generation(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    async def reset_prefix_cache(self, reset_running_requests: bool = ...) -> bool: ...
    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = ...,
        args: tuple[object, ...] = ...,
        kwargs: dict[str, object] | None = ...,
    ) -> object: ...


class HandoverError(Exception):
    """Refused or failed update, with an HTTP status and a message for people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Served:
    """Policy version and source of the engine's weights."""

    version: int
    path: str
    model: str | None = None
    """Model name that selects these weights in requests. None: name of the served model."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an update: seconds per phase. `changed` is False if the engine already had these weights."""

    version: int
    changed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    model: str | None = None
    """See `Served.model`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of new weights, and the function that loads them."""

    name: str
    """Folder, or address of the trainer."""
    load: Callable[[], Awaitable[Any]]
    """Load the weights. After an exception the engine's weights are unknown."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Optional preparation before the engine is paused, called only if the weights will be loaded. Raises `HandoverError`."""


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Weights that an engine may load, and the limits of a load."""

    base_model: str
    """Folder or name of the model that the server was started with."""
    weights_dir: str
    """Root folder of published weights."""
    expected: Shapes | None
    """Tensors of the base model, or None if unknown."""
    timeout: float
    """Deadline of one update in seconds."""
    on_broken: Callable[[], None]
    """Callback after a failure that the engine cannot recover from."""


class Handover:
    """Only writer of the engine's weights and version label."""

    def __init__(
        self,
        engine: Engine,
        options: HandoverOptions,
        *,
        receiver: Receiver | None = None,
        sleeper: Sleeper | None = None,
        rebuilder: Rebuilds | None = None,
    ) -> None:
        """Create the hand-over of one engine.

        Args:
            engine: vLLM's engine client.
            options: weights that the engine may load, and the limits of a load.
            receiver: receiver of versions from the trainer's memory, if enabled.
            sleeper: sleep control of an engine that shares its GPUs with the trainer.
            rebuilder: builder of versions from differences, if enabled.
        """
        self._engine = engine
        self._options = options
        self._receiver = receiver
        self._sleeper = sleeper
        self._rebuilder = rebuilder
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[object]] = set()
        self.served: Served | None = None
        self.fault: str | None = None
        """Reason why the engine's weights are unknown; None if they match `served`."""

    @property
    def is_updating(self) -> bool:
        """Whether an update is running; the engine then responds late without being faulty."""
        return self._lock.locked()

    @property
    def asleep(self) -> bool:
        """Whether the engine has freed its memory, or is about to, and refuses requests."""
        return self._sleeper is not None and self._sleeper.asleep

    async def sleep(self) -> float:
        """Free the engine's memory until the next update; returns the seconds. Raises `HandoverError`."""
        return await self._to_its_end(self._fall_asleep())

    async def _fall_asleep(self) -> float:
        async with self._lock:
            sleeper, began = self._sleeper, time.monotonic()
            if sleeper is None:
                raise HandoverError(400, "this engine does not share its GPUs; set placement.colocate to share them")
            if sleeper.asleep:
                return 0.0
            try:
                async with asyncio.timeout(self._options.timeout):
                    reach("turn.engine_falls_asleep")
                    await sleeper.sleep()
            except Exception as error:
                self._stop_server(
                    f"the engine could not be put to sleep, so the server stops: {self._failure_reason(error)}"
                )
            reach("turn.engine_asleep")
            return round(time.monotonic() - began, 4)

    def _failure_reason(self, error: Exception) -> str:
        return (
            f"no response within {self._options.timeout:g} s" if isinstance(error, TimeoutError) else last_line(error)
        )

    async def update(self, path: str, version: int, *, force: bool = False) -> Outcome:
        """Load the folder `path` as `version`. Raises `HandoverError`: 400 and 409 leave the engine unchanged; for 500 see `fault`."""

        async def resolve() -> Source:
            try:
                folder = await asyncio.to_thread(self._check_folder, path)
            except FolderError as error:
                raise HandoverError(400, str(error)) from None
            return self._rebuilt_source(folder) if is_delta(folder) else self._folder_source(str(folder))

        return await self._run_update(resolve, version, force)

    async def reload_base(self, version: int, *, force: bool = False) -> Outcome:
        """Load the model that the server was started with as `version`. Raises `HandoverError`."""

        async def resolve() -> Source:
            return self._folder_source(self._options.base_model)

        return await self._run_update(resolve, version, force)

    async def receive_version(self, trainer_url: str, version: int, *, force: bool = False) -> Outcome:
        """Receive `version` from the memory of the trainer at `trainer_url`. Raises `HandoverError`: 400, 404 (the trainer no longer
        has it) and 409 leave the engine unchanged."""
        receiver = self._receiver
        if receiver is None:
            raise HandoverError(
                400, "this server loads only folders; set weightSync.transport: NCCL to receive weights"
            )

        async def resolve() -> Source:
            return self._prepared_source(
                trainer_url, lambda: receiver.fetch(trainer_url, version), "transfer", after=receiver.free_version
            )

        return await self._run_update(resolve, version, force)

    def close(self) -> None:
        """Delete all data of transfers; called at the end of the server."""
        if self._receiver is not None:
            self._receiver.close()
        if self._rebuilder is not None:
            self._rebuilder.close()

    def _rebuilt_source(self, folder: Path) -> Source:
        """Return a version that is built in shared memory from differences."""
        rebuilder = self._rebuilder
        if rebuilder is None:
            raise HandoverError(
                400,
                f"{folder} contains only differences from another version; also set weightSync.deltas: Auto for the engines",
            )
        return self._prepared_source(str(folder), lambda: asyncio.to_thread(rebuilder.make, folder), "whole version")

    def _prepared_source(
        self, name: str, get: Callable[[], Awaitable[Path]], what: str, after: Callable[[], None] = lambda: None
    ) -> Source:
        """Return a source whose folder `get` creates before the engine is paused; `after` is called after loading."""
        made: list[Path] = []

        async def prepare() -> None:
            try:
                async with asyncio.timeout(self._options.timeout):
                    made.append(await get())
            except RefusedError as error:
                raise HandoverError(404 if error.gone else 409, str(error)) from None
            except TimeoutError:
                raise HandoverError(409, f"no {what} within {self._options.timeout:g} s") from None

        async def load() -> None:
            try:
                await self._folder_source(str(made[-1])).load()
            finally:
                after()

        return Source(name, load, prepare)

    def _folder_source(self, path: str) -> Source:
        return Source(path, lambda: self._engine.collective_rpc(LOAD, kwargs={"weights_path": path}))

    def _check_folder(self, path: str) -> Path:
        """Return the resolved folder; raises `FolderError` if it cannot be loaded."""
        return check_weights(path, self._options.weights_dir, self._options.expected)

    def is_of(self, path: str, run: str) -> bool:
        """Return whether guest `run` can load the folder `path`; an engine of a single run has no guests."""
        return False

    def holds_for(self, run: str, model: str | None) -> bool:
        """Return whether guest `run` can send requests to `model`."""
        return False

    def _replaced_weights(self, source: str) -> Served | None:
        """Return the served weights that weights from `source` would replace."""
        return self.served

    async def _run_update(self, resolve: Callable[[], Awaitable[Source]], version: int, force: bool) -> Outcome:
        """Run one update at a time."""
        return await self._to_its_end(self._update_under_lock(resolve, version, force))

    async def _to_its_end(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Run `work` to completion, even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _update_under_lock(self, resolve: Callable[[], Awaitable[Source]], version: int, force: bool) -> Outcome:
        async with self._lock:
            source = await resolve()
            held = self._replaced_weights(source.name) if self.fault is None else None
            same = held is not None and (held.version, held.path) == (version, source.name)
            if held is not None and same and not force and not self.asleep:
                return Outcome(version, changed=False, model=held.model)
            if held is not None and version < held.version and not force:
                raise HandoverError(
                    409,
                    f"version {version} is older than the served version {held.version}; send force: true to load it anyway",
                )
            # The salt of a new version has no cached prefixes yet, so the cache can stay.
            fresh = held is not None and version > held.version
            return await self._load_weights(source, version, keep_cache=fresh)

    async def _load_weights(self, source: Source, version: int, *, keep_cache: bool) -> Outcome:
        if source.prepare is not None:
            await source.prepare()
        marks = [time.monotonic()]
        phase, loading = "pausing the engine", False
        # Everything before `loading` leaves the old weights intact; a failure after it makes them unknown.
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._engine.pause_generation(mode="keep", clear_cache=False)
                reach("engine.paused")
                marks.append(time.monotonic())
                phase, loading = f"loading {source.name}", True
                self.fault = f"version {version} is being loaded"
                # Label all output as unknown before the first tensor changes; the new label follows after the last.
                await self._engine.update_weight_version(UNKNOWN_VERSION)
                sleeping = self._sleeper if self.asleep else None
                if sleeping is not None:
                    await sleeping.wake_weights()
                    reach("turn.engine_half_awake")
                await source.load()
                reach("engine.loaded")
                if not keep_cache:
                    phase = "dropping the prefix cache"
                    await self._engine.reset_prefix_cache(reset_running_requests=True)
                await self._engine.update_weight_version(str(version))
                if sleeping is not None:
                    await sleeping.wake_cache()
                self.served, self.fault = Served(version, source.name), None
                reach("engine.version_set")
                marks.append(time.monotonic())
        except Exception as error:
            message = f"update to version {version} failed while {phase}: {self._failure_reason(error)}"
            if loading:
                self._stop_server(f"{message}; the engine's weights are unknown, so the server stops")
            await self._resume_engine()
            raise HandoverError(500, f"{message}; the weights are unchanged") from None
        await self._resume_engine()
        reach("engine.resumed")
        marks.append(time.monotonic())
        # `zip` stops at the marks that exist.
        names = ("pause", "reload", "resume")
        seconds = {name: round(b - a, 4) for name, a, b in zip(names, marks, marks[1:], strict=False)}
        seconds["total"] = round(marks[-1] - marks[0], 4)
        return Outcome(version, changed=True, seconds=seconds)

    def _stop_server(self, fault: str) -> NoReturn:
        self.fault = fault
        logger.error(fault)
        self._options.on_broken()
        raise HandoverError(500, fault) from None

    async def _resume_engine(self) -> None:
        """Resume the engine. Retries while the engine still processes an earlier call, such as a reload that exceeded its deadline."""
        deadline = time.monotonic() + RESUME_TIMEOUT_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._engine.resume_generation()
                return
            except Exception as error:
                if self._engine.errored or time.monotonic() >= deadline:
                    self._stop_server(f"the engine could not be resumed, so the server stops: {last_line(error)}")
                await asyncio.sleep(RESUME_RETRY_SECONDS)


def last_line(error: BaseException) -> str:
    """Return the last line of an engine's error, because remote errors contain a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
