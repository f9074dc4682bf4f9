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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from loguru import logger

from rlrun.inference.preflight import FolderError, Shapes, check_weights

UNKNOWN_VERSION = "unknown"
RESUME_TIMEOUT_SECONDS = 30.0
RESUME_RETRY_SECONDS = 0.2


class Engine(Protocol):
    """The part of vLLM's engine client that a hand-over needs."""

    @property
    def errored(self) -> bool: ...
    async def pause_generation(self, *, mode: Any = ..., clear_cache: bool = ...) -> None: ...
    async def resume_generation(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    async def reset_prefix_cache(self, reset_running_requests: bool = ...) -> bool: ...
    async def collective_rpc(
        self, method: str, timeout: float | None = ..., args: tuple[Any, ...] = ..., kwargs: dict[str, Any] | None = ...
    ) -> Any: ...


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
    ) -> None:
        """`expected` are the base model's tensors (None: unknown), `timeout` is the deadline of one update in seconds,
        `on_broken` is called once the engine is beyond repair."""
        self._engine = engine
        self._base_model = base_model
        self._weights_dir = weights_dir
        self._expected = expected
        self._timeout = timeout
        self._on_broken = on_broken
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Outcome]] = set()
        self.served: Served | None = None
        self.fault: str | None = None
        """Why the engine's weights are unknown; None when they are as `served` says."""

    @property
    def busy(self) -> bool:
        """Whether an update is running: the engine then answers late, and that is no fault."""
        return self._lock.locked()

    async def update(self, path: str, version: int, *, force: bool = False) -> Outcome:
        """Load the folder `path` as `version`. Raises `HandoverError` (400, 409: engine untouched; 500: see `fault`)."""

        async def resolve() -> str:
            try:
                return str(await asyncio.to_thread(self._check, path))
            except FolderError as error:
                raise HandoverError(400, str(error)) from None

        return await self._exclusive(resolve, version, force)

    async def reload_base(self, version: int, *, force: bool = False) -> Outcome:
        """Load the model that the server was started with as `version`. Raises `HandoverError`."""

        async def resolve() -> str:
            return self._base_model

        return await self._exclusive(resolve, version, force)

    def _check(self, path: str) -> Path:
        """The resolved folder; raises `FolderError` for one that cannot be loaded."""
        return check_weights(path, self._weights_dir, self._expected)

    def _held(self, source: str) -> Served | None:
        """What weights from `source` would follow."""
        return self.served

    async def _exclusive(self, resolve: Callable[[], Awaitable[str]], version: int, force: bool) -> Outcome:
        """Run one update at a time, to its end even if the caller goes away."""
        task = asyncio.create_task(self._locked(resolve, version, force))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _locked(self, resolve: Callable[[], Awaitable[str]], version: int, force: bool) -> Outcome:
        async with self._lock:
            source = await resolve()
            held = self._held(source) if self.fault is None else None
            if held is not None and (held.version, held.path) == (version, source) and not force:
                return Outcome(version, changed=False, model=held.model)
            if held is not None and version < held.version and not force:
                raise HandoverError(
                    409, f"version {version} is older than {held.version}, which is served; send force: true to go back"
                )
            # Nothing is cached under the salt of a version that was not served before.
            fresh = held is not None and version > held.version
            return await self._load(source, version, keep_cache=fresh)

    async def _load(self, source: str, version: int, *, keep_cache: bool) -> Outcome:
        marks = [time.monotonic()]
        phase, loading = "pausing the engine", False
        try:
            async with asyncio.timeout(self._timeout):
                await self._engine.pause_generation(mode="keep", clear_cache=False)
                marks.append(time.monotonic())
                phase, loading = f"loading {source}", True
                self.fault = f"version {version} is being loaded"
                await self._engine.update_weight_version(UNKNOWN_VERSION)
                await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": source})
                if not keep_cache:
                    phase = "dropping the prefix cache"
                    await self._engine.reset_prefix_cache(reset_running_requests=True)
                await self._engine.update_weight_version(str(version))
                self.served, self.fault = Served(version, source), None
                marks.append(time.monotonic())
        except Exception as error:
            reason = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else last_line(error)
            message = f"update to version {version} failed while {phase}: {reason}"
            if loading:
                self._break(f"{message}; the engine's weights are unknown, so the server stops")
            await self._resume()
            raise HandoverError(500, f"{message}; the weights are unchanged") from None
        await self._resume()
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
        """Resume, trying again while the engine still finishes what it was told before (a reload that ran too long)."""
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
    """The part of an engine's error that says what happened: remote errors carry a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
