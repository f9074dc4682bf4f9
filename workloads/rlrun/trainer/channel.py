"""Rank 0's side of the channel to the orchestrator: an HTTP server in a thread of its own, so that it answers while a step computes.

The training loop appends events and takes batches; the handlers only read and put into queues. Every request but the probe's needs the
run's key.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from math import isfinite
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from rlrun.protocol import channel as protocol
from rlrun.protocol import exit_codes
from rlrun.protocol.channel import BatchReady, Event, EventKind, EventList, OrchestratorSaved, Phase, TrainerState
from rlrun.protocol.endpoints import TRAINER_READY
from rlrun.protocol.failures import RoleError

MAX_WAIT_SECONDS = 60.0
"""Longest long poll; a client that asks for more gets this."""
_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_GONE_SECONDS = 2.0
"""An orchestrator that has no request open, and has made none for so long, has ended."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Channel:
    """The server. Created before the model is loaded, so that the orchestrator can see how far the start is."""

    def __init__(self, *, attempt: int, api_key: str, host: str, port: int, batch_path: Callable[[int], Path]) -> None:
        """Bind and serve.

        Args:
            attempt: this attempt; every answer carries it.
            api_key: expected as `Authorization: Bearer`.
            host: address to bind.
            port: port to bind; 0 takes a free one, see `port`.
            batch_path: where this attempt's batch of a step has to be; anything else is refused.

        Raises:
            RoleError: the address cannot be bound.
        """
        self._attempt, self._key, self._batch_path = attempt, api_key, batch_path
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._base = self._step = 0
        self._phase: Phase = "starting"
        self._phase_since = time.time()
        self._ready = False
        self._next_batch = 0
        self._saved: set[int] = set()
        self.batches: queue.Queue[BatchReady] = queue.Queue()
        """Accepted batches in order of step, each step once."""
        self.agreed: Callable[[int], None] = lambda step: None
        """Called with the step when the orchestrator's part of a checkpoint is durable."""
        self.shutdown = threading.Event()
        """Set when the orchestrator says that all is done."""
        self.last_contact = time.monotonic()
        """When the orchestrator last asked for something."""
        self._open = 0
        self._news: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        started: queue.Queue[OSError | int] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, args=(host, port, started), name="channel", daemon=True)
        self._thread.start()
        outcome = started.get(timeout=_START_SECONDS)
        if isinstance(outcome, OSError):
            reason = outcome.strerror or str(outcome)
            raise RoleError(f"trainer.port: cannot listen on {host}:{port}: {reason}", exit_codes.UNAVAILABLE)
        self.port = outcome

    def begin(self, base_step: int) -> None:
        """Open for batches: this attempt starts from `base_step`."""
        with self._lock:
            self._base = self._step = base_step
            self._next_batch = base_step + 1
            self._ready = True

    def phase(self, phase: Phase) -> None:
        """Say what the trainer does from now on."""
        with self._lock:
            self._phase, self._phase_since = phase, time.time()

    def emit(
        self, kind: EventKind, step: int, *, path: Path | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Append an event and wake everybody who waits for one. Metrics that are not finite are left out: JSON has no word for them."""
        finite = {name: value for name, value in (metrics or {}).items() if isfinite(value)}
        with self._lock:
            if kind == "trained":
                self._step = step
            elif kind == "checkpoint_saved":
                self._saved.add(step)
            seq = len(self._events) + 1
            self._events.append(Event(seq=seq, kind=kind, step=step, path=str(path) if path else None, metrics=finite))
        self._loop.call_soon_threadsafe(self._wake)

    def has_client(self) -> bool:
        """Whether the orchestrator is there: it polls for events all the time."""
        return self._open > 0 or time.monotonic() - self.last_contact < _GONE_SECONDS

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = asyncio.Event()

    def _serve(self, host: str, port: int, started: queue.Queue[OSError | int]) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        self._news = asyncio.Event()

        @web.middleware
        async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        application = web.Application(middlewares=[guard])
        application.router.add_get(TRAINER_READY, self._get_ready)
        application.router.add_get(protocol.STATE, self._get_state)
        application.router.add_get(protocol.EVENTS, self._get_events)
        application.router.add_post(protocol.BATCHES, self._post_batch)
        application.router.add_post(protocol.CHECKPOINTS, self._post_checkpoint)
        application.router.add_post(protocol.SHUTDOWN, self._post_shutdown)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        try:
            loop.run_until_complete(runner.setup())
            loop.run_until_complete(web.TCPSite(runner, host, port).start())
        except OSError as error:
            started.put(error)
            return
        started.put(int(runner.addresses[0][1]))
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if (
            request.method in ("GET", "HEAD") and request.path == TRAINER_READY
        ):  # a probe carries no key and is no contact
            return await handler(request)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            return _refuse(401, "wrong or missing API key")
        self.last_contact = time.monotonic()
        self._open += 1
        try:
            return await handler(request)
        except ValidationError as error:
            return _refuse(422, f"the request's body is wrong: {error.errors(include_url=False)}")
        finally:  # also when the client has hung up
            self._open -= 1

    def _state(self) -> TrainerState:
        with self._lock:
            return TrainerState(
                attempt=self._attempt,
                base_step=self._base,
                step=self._step,
                phase=self._phase,
                phase_since=self._phase_since,
                last_event=len(self._events),
            )

    async def _get_ready(self, request: web.Request) -> web.Response:
        with self._lock:
            ready = self._ready
        reason = None if ready else "the attempt has not begun: the base checkpoint is chosen, or the model is loaded"
        return web.json_response({"ready": ready, "reason": reason}, status=200 if ready else 503)

    async def _get_state(self, request: web.Request) -> web.Response:
        return _answer(self._state().model_dump_json())

    async def _get_events(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "0"))
            wait = min(float(request.query.get("wait", "0")), MAX_WAIT_SECONDS)
        except ValueError:
            return _refuse(422, f"after and wait are numbers, got {dict(request.query)}")
        if after < 0 or not wait >= 0:
            return _refuse(422, f"after and wait are not negative, got {dict(request.query)}")
        deadline = self._loop.time() + wait
        while True:
            news = self._news  # taken before looking, so that an event in between wakes this one
            assert news is not None
            with self._lock:
                events = self._events[after:]
            left = deadline - self._loop.time()
            if events or left <= 0:
                self.last_contact = time.monotonic()
                return _answer(EventList(attempt=self._attempt, events=events).model_dump_json())
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                continue

    async def _post_batch(self, request: web.Request) -> web.Response:
        batch = BatchReady.model_validate_json(await request.text())
        expected_path = self._batch_path(batch.step)
        with self._lock:
            if not self._ready:
                return _refuse(409, "the trainer is starting: it takes batches after its first `published` event")
            if Path(batch.path) != expected_path:
                return _refuse(409, f"the batch of step {batch.step} has to be in {expected_path}, got {batch.path}")
            if batch.step > self._next_batch:
                return _refuse(409, f"expected the batch of step {self._next_batch}, got step {batch.step}")
            if batch.step == self._next_batch:
                self._next_batch += 1
                self.batches.put(batch)
            elif batch.step <= self._base:
                return _refuse(409, f"this attempt starts from step {self._base}; got the batch of step {batch.step}")
        return _answer('{"accepted": true}')

    async def _post_checkpoint(self, request: web.Request) -> web.Response:
        saved = OrchestratorSaved.model_validate_json(await request.text())
        with self._lock:
            known = saved.step in self._saved
        if not known:
            return _refuse(409, f"this attempt has saved no checkpoint of step {saved.step}")
        self.agreed(saved.step)
        return _answer('{"accepted": true}')

    async def _post_shutdown(self, request: web.Request) -> web.Response:
        self.shutdown.set()
        return _answer('{"accepted": true}')


def _answer(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
