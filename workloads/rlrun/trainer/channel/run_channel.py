"""Rank 0's end of one run's channel to its orchestrator.

The HTTP server runs in its own thread and answers during a training step. The training loop appends events and takes batches; the
handlers only read state and fill queues.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from aiohttp import web

from rlrun.protocol.files.volume_faults import Trouble
from rlrun.protocol.messages import trainer_channel as protocol
from rlrun.protocol.messages.endpoints import TRAINER_READY
from rlrun.protocol.messages.trainer_channel import (
    TRANSFERS,
    BatchReady,
    Event,
    EventKind,
    EventList,
    NotHeldError,
    OrchestratorSaved,
    Phase,
    RankState,
    StorageTrouble,
    TrainerState,
    TransferOffer,
    TransferRequest,
)
from rlrun.runtime.http_site import Handler
from rlrun.trainer.channel.channel_server import ChannelServer, refuse_request

MAX_WAIT_SECONDS = 60.0
"""Longest duration of a long poll; longer requests are shortened to it."""
MAX_ASKING = 1024
"""Maximum number of concurrent transfer requests of engines; each waits for the others in its own thread."""
KEPT_EVENTS = 1000
"""Events kept in memory after the orchestrator has read them; the events of 10,000 steps take 33 MB."""
_GONE_SECONDS = 2.0
"""Time without an open or new request after which the orchestrator counts as ended."""


class Channel:
    """End of one run's channel. The host's is created before the model is loaded, so that the orchestrator can read the phase of the
    start.
    """

    def __init__(
        self,
        server: ChannelServer,
        *,
        run: str = "",
        attempt: int,
        batch_path: Callable[[int], Path],
        news: threading.Event | None = None,
    ) -> None:
        """Register the run's routes at the server.

        Args:
            server: HTTP server with address and key.
            run: name of a guest; empty for the trainer's own run.
            attempt: number of the run's attempt, part of every answer.
            batch_path: required folder of this attempt's batch of a step; other folders are refused.
            news: event that wakes the training loop.
        """
        self._server, self._run, self._attempt, self._batch_path = server, run, attempt, batch_path
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._dropped = 0
        """Number of events before the first of `_events`."""
        self._base = self._step = 0
        self._phase: Phase = "starting"
        self._phase_since = time.time()
        self._part = 0
        self.ranks: Callable[[], list[RankState]] = list
        """Source of the other ranks' states; called in a thread."""
        self._ready = False
        self._next_batch = 0
        self._saved: set[int] = set()
        self.news = news or threading.Event()
        self.batches: queue.Queue[BatchReady] = queue.Queue()
        """Accepted batches in order of step, each step once."""
        self.offer: Callable[[TransferRequest], TransferOffer] | None = None
        """Transfer of a version from this process's memory to an engine; None if engines read versions from the volume."""
        self._offering = ThreadPoolExecutor(MAX_ASKING, thread_name_prefix="offer")
        self.agreed: Callable[[int], None] = lambda step: None
        """Callback with the step of a checkpoint after the orchestrator's part of it is durable."""
        self.trouble: Callable[[], Trouble | None] = lambda: None
        """Source of the volume's current fault; called in the server's thread, so it must not access files."""
        self.shutdown = threading.Event()
        """Event that is set by the orchestrator's shutdown request."""
        self.stop: Callable[[], None] = lambda: None
        """Callback of the orchestrator's stop request; no effect for a guest, whose end the host controls."""
        self.last_contact = time.monotonic()
        """Time of the orchestrator's last request, in seconds of `time.monotonic`."""
        self._open = 0
        self._happened = asyncio.Event()
        self._handlers = self._route_handlers()
        server.add_run(run, self)

    def _route_handlers(self) -> dict[tuple[str, str], Handler]:
        return {
            ("GET", TRAINER_READY): self._get_ready,
            ("GET", protocol.STATE): self._get_state,
            ("GET", protocol.EVENTS): self._get_events,
            ("POST", protocol.BATCHES): self._post_batch,
            ("POST", protocol.CHECKPOINTS): self._post_checkpoint,
            ("POST", protocol.SHUTDOWN): self._post_shutdown,
            ("POST", protocol.STOP): self._post_stop,
            ("POST", TRANSFERS): self._post_transfer,
        }

    @classmethod
    def start_server(
        cls,
        *,
        attempt: int,
        api_key: str,
        host: str,
        port: int,
        batch_path: Callable[[int], Path],
        news: threading.Event | None = None,
    ) -> Channel:
        """Create the channel of the trainer's own run and start its server at `host` and `port`.

        Raises:
            RoleError: the address cannot be bound.
        """
        server = ChannelServer(api_key)
        channel = cls(server, attempt=attempt, batch_path=batch_path, news=news)
        server.start(host, port)
        return channel

    def open_guest_channel(self, run: str, *, attempt: int, batch_path: Callable[[int], Path]) -> Channel:
        """Create a guest's channel at the same address below the path `channel_of(run)`, with the same key."""
        other = Channel(self._server, run=run, attempt=attempt, batch_path=batch_path, news=self.news)
        other.ranks = self.ranks
        return other

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._server.port

    def accept_batches(self, base_step: int) -> None:
        """Accept batches of this attempt, which starts from `base_step`."""
        with self._lock:
            self._base = self._step = base_step
            self._next_batch = base_step + 1
            self._ready = True

    def phase(self, phase: Phase) -> None:
        """Set the phase of the trainer."""
        with self._lock:
            self._phase, self._phase_since, self._part = phase, time.time(), 0

    def part(self) -> None:
        """Count the next micro-batch of the phase."""
        with self._lock:
            self._part += 1

    def append_event(
        self, kind: EventKind, step: int, *, path: Path | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Append an event and wake waiting requests. Metrics that are not finite are left out, because JSON cannot contain them."""
        finite = {name: value for name, value in (metrics or {}).items() if isfinite(value)}
        with self._lock:
            if kind == "trained":
                self._step = step
            elif kind == "checkpoint_saved":
                self._saved.add(step)
            # Numbers continue after old events are dropped, so the orchestrator can always name the
            # last one that it has read.
            seq = self._dropped + len(self._events) + 1
            self._events.append(Event(seq=seq, kind=kind, step=step, path=str(path) if path else None, metrics=finite))
        self._server.loop.call_soon_threadsafe(self._wake_requests)

    def has_client(self) -> bool:
        """Return whether the orchestrator is connected; it polls for events continuously."""
        return self._open > 0 or time.monotonic() - self.last_contact < _GONE_SECONDS

    def close(self) -> None:
        """Stop answering; the host's channel also stops the server and all guests' channels."""
        self._offering.shutdown(wait=False, cancel_futures=True)
        if self._run:
            self._server.remove_run(self._run)
        else:
            self._server.close()

    def _wake_requests(self) -> None:
        self._happened.set()
        self._happened = asyncio.Event()

    async def answer_request(self, request: web.Request, route: str) -> web.StreamResponse:
        """Answer an authenticated request, or the readiness probe."""
        handler = self._handlers.get(("GET" if request.method == "HEAD" else request.method, route))
        if handler is None:
            return refuse_request(404, f"there is no {request.method} {route}")
        if route == TRAINER_READY:
            return await handler(request)
        # Counted at the start too, because a long poll is open for up to a minute.
        self.last_contact = time.monotonic()
        self._open += 1
        try:
            return await handler(request)
        finally:  # also after the client has disconnected
            self._open -= 1

    def _current_state(self) -> TrainerState:
        trouble = self.trouble()
        with self._lock:
            return TrainerState(
                attempt=self._attempt,
                base_step=self._base,
                step=self._step,
                phase=self._phase,
                phase_since=self._phase_since,
                last_event=self._dropped + len(self._events),
                part=self._part,
                storage=None if trouble is None else StorageTrouble(**asdict(trouble)),
            )

    async def _get_ready(self, request: web.Request) -> web.Response:
        with self._lock:
            ready = self._ready
        reason = (
            None
            if ready
            else "the attempt has not started: the trainer is choosing the base checkpoint or loading the model"
        )
        return web.json_response({"ready": ready, "reason": reason}, status=200 if ready else 503)

    async def _get_state(self, request: web.Request) -> web.Response:
        state = self._current_state()
        state = state.model_copy(update={"ranks": await asyncio.to_thread(self.ranks)})
        return _json_answer(state.model_dump_json())

    async def _get_events(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "0"))
            wait = min(float(request.query.get("wait", "0")), MAX_WAIT_SECONDS)
        except ValueError:
            return refuse_request(422, f"after and wait must be numbers, got {dict(request.query)}")
        if after < 0 or not wait >= 0:
            return refuse_request(422, f"after and wait must not be negative, got {dict(request.query)}")
        clock = self._server.loop.time
        deadline = clock() + wait
        while True:
            happened = self._happened  # read before the events, so that an event in between wakes this request
            events = self._events_after(after)
            if events is None:
                return refuse_request(
                    409, f"events up to {self._dropped} are deleted because the orchestrator has requested later ones"
                )
            left = deadline - clock()
            if events or left <= 0:
                self.last_contact = time.monotonic()
                return _json_answer(EventList(attempt=self._attempt, events=events).model_dump_json())
            try:
                await asyncio.wait_for(happened.wait(), left)
            except TimeoutError:
                continue

    def _events_after(self, after: int) -> list[Event] | None:
        """Return the events after a number and drop old read events; return None if requested events were dropped."""
        with self._lock:
            if after < self._dropped:
                return None
            old = min(after - self._dropped, len(self._events)) - KEPT_EVENTS
            if old >= KEPT_EVENTS:  # many at once, so that the cost per event does not grow with the run
                del self._events[:old]
                self._dropped += old
            return self._events[after - self._dropped :]

    async def _post_batch(self, request: web.Request) -> web.Response:
        batch = BatchReady.model_validate_json(await request.read())
        expected_path = self._batch_path(batch.step)
        with self._lock:
            if not self._ready:
                return refuse_request(
                    409, "the trainer is starting; it accepts batches after its first `published` event"
                )
            if Path(batch.path) != expected_path:
                return refuse_request(
                    409, f"the batch of step {batch.step} must be in {expected_path}, got {batch.path}"
                )
            if batch.step > self._next_batch:
                return refuse_request(409, f"expected the batch of step {self._next_batch}, got step {batch.step}")
            # A repeated announcement of an earlier batch is only confirmed: the orchestrator
            # repeats requests whose answer was lost.
            if batch.step == self._next_batch:
                self._next_batch += 1
                self.batches.put(batch)
                self.news.set()
            elif batch.step <= self._base:
                return refuse_request(
                    409, f"this attempt starts from step {self._base}; got the batch of step {batch.step}"
                )
        return _json_answer('{"accepted": true}')

    async def _post_checkpoint(self, request: web.Request) -> web.Response:
        saved = OrchestratorSaved.model_validate_json(await request.read())
        with self._lock:
            known = saved.step in self._saved
        if not known:
            return refuse_request(409, f"this attempt has saved no checkpoint of step {saved.step}")
        self.agreed(saved.step)
        return _json_answer('{"accepted": true}')

    async def _post_shutdown(self, request: web.Request) -> web.Response:
        self.shutdown.set()
        self.news.set()
        return _json_answer('{"accepted": true}')

    async def _post_stop(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self.stop)
        return _json_answer('{"accepted": true}')

    async def _post_transfer(self, request: web.Request) -> web.Response:
        wanted = TransferRequest.model_validate_json(await request.read())
        if self.offer is None:
            return refuse_request(
                409, "this trainer publishes to the volume only; set weightSync.transport: NCCL for all roles"
            )
        try:
            # Its own pool: each request waits for the other engines, and the default pool would be
            # exhausted by them.
            offer = await self._server.loop.run_in_executor(self._offering, self.offer, wanted)
            return _json_answer(offer.model_dump_json())
        except NotHeldError as error:
            return refuse_request(404, str(error))


def _json_answer(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json")
