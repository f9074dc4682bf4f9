"""The weight hand-over: pause, reload, name the version, resume, as one operation inside the server.

One call instead of four from the orchestrator: an orchestrator that is killed between pause and resume cannot leave
the engine paused. Invariants:

- While weights are being changed the engine labels its output `UNKNOWN_VERSION`, and names the new version only after
  the reload succeeded. Whatever fails, no token is ever reported with a version that did not sample it.
- A paused engine looks alive and answers nobody, so it is resumed on every path but one: after a reload that broke
  half-way. One forward pass through half-loaded layers kills vLLM's engine, and it cannot load again either. Then
  `on_broken` is called, and the server ends itself to be replaced by a fresh one.
- A prefix cached under older weights is never used under newer ones: clients salt the cache with the version, and an
  update that does not raise the version (a run that fell back) drops the cache here.
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
from rlrun.protocol.messages.delta_files import is_delta

ResultT = TypeVar("ResultT")
UNKNOWN_VERSION = "unknown"
LOAD = "load_version"
"""Method of vLLM's workers (`loading.Loading`)."""
RESUME_TIMEOUT_SECONDS = 30.0
RESUME_RETRY_SECONDS = 0.2


class Rebuilds(Protocol):
    """Puts versions together from what differs (`delta_folders.Rebuilder`, which needs numpy)."""

    def make(self, folder: Path) -> Path:
        """The folder with the whole version of a published folder."""
        ...

    def close(self) -> None:
        """Leave nothing in shared memory."""
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
    """A refused or failed update, as an HTTP status and a message for people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Served:
    """The weights in the engine: their policy version and where they came from."""

    version: int
    path: str
    model: str | None = None
    """The name that requests ask for these weights with; None: the served model's."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished update: seconds per phase; `changed` is False when the engine held these weights already."""

    version: int
    changed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    model: str | None = None
    """See `Served`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of weights, and the way they get into the engine."""

    name: str
    """The folder, or the trainer's address."""
    load: Callable[[], Awaitable[Any]]
    """Whatever it raises leaves the weights unknown."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Preparation before loading, once it is certain that they are loaded; raises `HandoverError`, and the engine is untouched."""


class Handover:
    """The one writer of the engine's weights and of its version label."""

    def __init__(
        self,
        engine: Engine,
        *,
        base_model: str,
        weights_dir: str,
        expected: Shapes | None,
        timeout: float,
        on_broken: Callable[[], None],
        receiver: Receiver | None = None,
        sleeper: Sleeper | None = None,
        rebuilder: Rebuilds | None = None,
    ) -> None:
        """`expected` are the base model's tensors (None: unknown), `timeout` is the deadline of one update in seconds,
        `on_broken` is called once the engine is beyond repair, `receiver` takes versions from the trainer's memory, and
        `sleeper` gives the engine's GPUs to the trainer, and `rebuilder` puts versions together from what differs, each where the engine
        was started for that."""
        self._engine = engine
        self._base_model = base_model
        self._weights_dir = weights_dir
        self._expected = expected
        self._timeout = timeout
        self._on_broken = on_broken
        self._receiver = receiver
        self._sleeper = sleeper
        self._rebuilder = rebuilder
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[object]] = set()
        self.served: Served | None = None
        self.fault: str | None = None
        """Reason why the engine's weights are unknown; None when they are as `served` says."""

    @property
    def busy(self) -> bool:
        """True while an update is running: the engine then answers late, and that is no fault."""
        return self._lock.locked()

    @property
    def asleep(self) -> bool:
        """True if the engine has given its memory up, or is about to, and answers no requests."""
        return self._sleeper is not None and self._sleeper.asleep

    async def sleep(self) -> float:
        """Give the engine's memory up until the next update; returns seconds. Raises `HandoverError`."""
        return await self._to_its_end(self._fall_asleep())

    async def _fall_asleep(self) -> float:
        async with self._lock:
            sleeper, began = self._sleeper, time.monotonic()
            if sleeper is None:
                raise HandoverError(400, "this engine has its GPUs for itself; set placement.colocate to share them")
            if sleeper.asleep:
                return 0.0
            try:
                async with asyncio.timeout(self._timeout):
                    reach("turn.engine_falls_asleep")
                    await sleeper.sleep()
            except Exception as error:
                self._break(f"the engine could not be put to sleep, so the server stops: {self._reason(error)}")
            reach("turn.engine_asleep")
            return round(time.monotonic() - began, 4)

    def _reason(self, error: Exception) -> str:
        return f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else last_line(error)

    async def update(self, path: str, version: int, *, force: bool = False) -> Outcome:
        """Load the folder `path` as `version`. Raises `HandoverError` (400, 409: engine untouched; 500: see `fault`)."""

        async def resolve() -> Source:
            try:
                folder = await asyncio.to_thread(self._check, path)
            except FolderError as error:
                raise HandoverError(400, str(error)) from None
            return self._rebuilt(folder) if is_delta(folder) else self._folder(str(folder))

        return await self._exclusive(resolve, version, force)

    async def reload_base(self, version: int, *, force: bool = False) -> Outcome:
        """Load the model that the server was started with as `version`. Raises `HandoverError`."""

        async def resolve() -> Source:
            return self._folder(self._base_model)

        return await self._exclusive(resolve, version, force)

    async def receive(self, trainer_url: str, version: int, *, force: bool = False) -> Outcome:
        """Receive `version` from the memory of the trainer at `trainer_url`. Raises `HandoverError`; 400, 404 (the trainer
        no longer has it) and 409 leave the engine untouched."""
        receiver = self._receiver
        if receiver is None:
            raise HandoverError(400, "this server takes folders; set weightSync.transport: NCCL to receive weights")

        async def resolve() -> Source:
            return self._prepared(
                trainer_url, lambda: receiver.fetch(trainer_url, version), "transfer", after=receiver.drop
            )

        return await self._exclusive(resolve, version, force)

    def close(self) -> None:
        """Leave nothing of a transfer behind; the server ends."""
        if self._receiver is not None:
            self._receiver.close()
        if self._rebuilder is not None:
            self._rebuilder.close()

    def _rebuilt(self, folder: Path) -> Source:
        """A version that is put together in shared memory from what differs."""
        rebuilder = self._rebuilder
        if rebuilder is None:
            raise HandoverError(
                400,
                f"{folder} is what differs from another version; set weightSync.deltas: Auto for the engines as well",
            )
        return self._prepared(str(folder), lambda: asyncio.to_thread(rebuilder.make, folder), "whole version")

    def _prepared(
        self, name: str, get: Callable[[], Awaitable[Path]], what: str, after: Callable[[], None] = lambda: None
    ) -> Source:
        """A source whose folder is made before the engine is touched, by `get`; `after` is called when it is loaded."""
        made: list[Path] = []

        async def prepare() -> None:
            try:
                async with asyncio.timeout(self._timeout):
                    made.append(await get())
            except RefusedError as error:
                raise HandoverError(404 if error.gone else 409, str(error)) from None
            except TimeoutError:
                raise HandoverError(409, f"no {what} within {self._timeout:g} s") from None

        async def load() -> None:
            try:
                await self._folder(str(made[-1])).load()
            finally:
                after()

        return Source(name, load, prepare)

    def _folder(self, path: str) -> Source:
        return Source(path, lambda: self._engine.collective_rpc(LOAD, kwargs={"weights_path": path}))

    def _check(self, path: str) -> Path:
        """The resolved folder; raises `FolderError` for one that cannot be loaded."""
        return check_weights(path, self._weights_dir, self._expected)

    def is_of(self, path: str, run: str) -> bool:
        """True if a guest of this name may have the folder `path` loaded: an engine of one run alone has no guests."""
        return False

    def holds_for(self, run: str, model: str | None) -> bool:
        """True if a guest of this name may ask `model`."""
        return False

    def _held(self, source: str) -> Served | None:
        """Served weights that those from `source` would follow."""
        return self.served

    async def _exclusive(self, resolve: Callable[[], Awaitable[Source]], version: int, force: bool) -> Outcome:
        """Run one update at a time."""
        return await self._to_its_end(self._locked(resolve, version, force))

    async def _to_its_end(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Run `work` to its end, even if the caller goes away."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _locked(self, resolve: Callable[[], Awaitable[Source]], version: int, force: bool) -> Outcome:
        async with self._lock:
            source = await resolve()
            held = self._held(source.name) if self.fault is None else None
            same = held is not None and (held.version, held.path) == (version, source.name)
            if held is not None and same and not force and not self.asleep:
                return Outcome(version, changed=False, model=held.model)
            if held is not None and version < held.version and not force:
                raise HandoverError(
                    409, f"version {version} is older than {held.version}, which is served; send force: true to go back"
                )
            # Nothing is cached under the salt of a version that was not served before.
            fresh = held is not None and version > held.version
            return await self._load(source, version, keep_cache=fresh)

    async def _load(self, source: Source, version: int, *, keep_cache: bool) -> Outcome:
        if source.prepare is not None:
            await source.prepare()
        marks = [time.monotonic()]
        phase, loading = "pausing the engine", False
        try:
            async with asyncio.timeout(self._timeout):
                await self._engine.pause_generation(mode="keep", clear_cache=False)
                reach("engine.paused")
                marks.append(time.monotonic())
                phase, loading = f"loading {source.name}", True
                self.fault = f"version {version} is being loaded"
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
            message = f"update to version {version} failed while {phase}: {self._reason(error)}"
            if loading:
                self._break(f"{message}; the engine's weights are unknown, so the server stops")
            await self._resume()
            raise HandoverError(500, f"{message}; the weights are unchanged") from None
        await self._resume()
        reach("engine.resumed")
        marks.append(time.monotonic())
        names = ("pause", "reload", "resume")
        seconds = {name: round(b - a, 4) for name, a, b in zip(names, marks, marks[1:], strict=False)}
        seconds["total"] = round(marks[-1] - marks[0], 4)
        return Outcome(version, changed=True, seconds=seconds)

    def _break(self, fault: str) -> NoReturn:
        self.fault = fault
        logger.error(fault)
        self._on_broken()
        raise HandoverError(500, fault) from None

    async def _resume(self) -> None:
        """Resume, trying again while the engine still finishes what it was asked before (a reload that ran too long)."""
        deadline = time.monotonic() + RESUME_TIMEOUT_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._engine.resume_generation()
                return
            except Exception as error:
                if self._engine.errored or time.monotonic() >= deadline:
                    self._break(f"the engine could not be resumed, so the server stops: {last_line(error)}")
                await asyncio.sleep(RESUME_RETRY_SECONDS)


def last_line(error: BaseException) -> str:
    """Informative part of an engine's error: remote errors carry a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
