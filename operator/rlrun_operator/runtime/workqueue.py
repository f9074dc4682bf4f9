"""Work queue of keys: each key is at most once in the queue and at most once in work; failures are retried with growing pauses.

`WorkQueue` is plain data over a given time, so that tests need no clock. `Workers` runs a coroutine per key over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from rlrun.backoff import backoff

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
CONCURRENCY = 16
"""Maximum number of keys in work. Work mostly waits for the API server."""


class WorkQueue(Generic[K]):
    """Queue that determines the next key. All times are seconds of one monotonic clock, passed by the caller.

    Keys leave the queue in the order in which they became ready, so that a busy key cannot starve the others. A key that is added while
    it is in work leaves the queue once more afterwards. A failed key does not leave the queue before its pause is over.

    Work on a new key is long, and a thousand new keys may arrive at once: at most `most_new` of them are in work while another key is
    ready.

    Args:
        is_new: whether a key is new; called when the key becomes ready.
        most_new: maximum number of new keys in work while others wait; at least 1.
    """

    def __init__(self, is_new: Callable[[K], bool] = lambda key: False, most_new: int = CONCURRENCY // 2) -> None:
        self._is_new = is_new
        self._most_new = most_new
        self._known: OrderedDict[K, float] = OrderedDict()
        self._new: OrderedDict[K, float] = OrderedDict()
        self._begun: set[K] = set()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._active: dict[K, float] = {}
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._taken_at = float("-inf")

    def add(self, key: K, now: float, delay: float = 0.0) -> None:
        """Schedule `key` after `delay` seconds; the shortest of several delays applies."""
        at = max(now + delay, self._not_before.get(key, now))
        if at > now:
            if not self._is_ready(key) and at < self._due.get(key, float("inf")):
                self._due[key] = at
                self._sequence += 1
                heapq.heappush(self._heap, (at, self._sequence, key))
            return
        self._due.pop(key, None)
        if key in self._active:
            self._again.add(key)
        else:
            self._add_ready(key, now)

    def pop(self, now: float) -> K | None:
        """Return the next key, which is then in work, or None if no key is ready."""
        self._promote_due(now)
        lanes = [lane for lane in (self._known, self._new) if lane]
        if not lanes:
            return None
        if len(lanes) == 2:
            enough = len(self._begun) >= self._most_new
            lanes = [self._known if enough else min(lanes, key=_oldest_ready)]
        key, _ = lanes[0].popitem(last=False)
        if lanes[0] is self._new:
            self._begun.add(key)
        self._active[key] = self._taken_at = now
        return key

    def record_success(self, key: K, now: float) -> None:
        """Record that work on `key` succeeded."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._finish_key(key, now)

    def record_failure(self, key: K, now: float) -> float:
        """Record that work on `key` failed. Returns the seconds until its retry."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = backoff(failures, first=FIRST_BACKOFF_SECONDS, longest=LONGEST_BACKOFF_SECONDS)
        self._not_before[key] = now + pause
        self._again.discard(key)
        self._due.pop(key, None)  # requests from before the failure
        self._finish_key(key, now)
        self.add(key, now)
        return pause

    def end_pauses(self, now: float) -> None:
        """End all pauses, because the common cause of the failures (an unavailable API server) is over."""
        self._taken_at = now
        waiting = list(self._not_before)
        self._failures.clear()
        self._not_before.clear()
        for key in waiting:
            self.add(key, now)

    def next_due(self) -> float | None:
        """Return the time at which the earliest delayed key becomes ready, or None."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def count_ready(self, now: float) -> int:
        """Return the number of ready keys that are not in work."""
        self._promote_due(now)
        return len(self._known) + len(self._new)

    def age(self, now: float) -> float:
        """Return the seconds since the oldest ready key became ready."""
        self._promote_due(now)
        return max((now - _oldest_ready(lane) for lane in (self._known, self._new) if lane), default=0.0)

    def standstill(self, now: float) -> float:
        """Return the seconds for which keys have been ready without one leaving the queue."""
        return min(self.age(now), now - self._taken_at)

    def longest_work(self, now: float) -> float:
        """Return the seconds since the oldest key in work left the queue."""
        return now - min(self._active.values()) if self._active else 0.0

    def _is_ready(self, key: K) -> bool:
        return key in self._known or key in self._new

    def _add_ready(self, key: K, at: float) -> None:
        if not self._is_ready(key):
            (self._new if self._is_new(key) else self._known)[key] = at

    def _finish_key(self, key: K, now: float) -> None:
        self._active.pop(key, None)
        self._begun.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key, now)

    def _promote_due(self, now: float) -> None:
        while (at := self.next_due()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            if key in self._active:
                self._again.add(key)
            else:
                self._add_ready(key, at)


def _oldest_ready(lane: OrderedDict[K, float]) -> float:
    """Return the time at which the first key of a non-empty lane became ready."""
    return next(iter(lane.values()))


class Workers(Generic[K]):
    """Workers that process the queue's keys concurrently while they are open.

    Args:
        work: function for one key. An exception is a failure: the key is retried.
        on_failure: callback at each failure, with the pause in seconds until the retry.
        is_new: see `WorkQueue`; new keys use at most half of the workers while others wait.
        concurrency: maximum number of keys in work.
        clock: steady seconds.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[None]],
        on_failure: Callable[[K, Exception, float], None],
        *,
        is_new: Callable[[K], bool] = lambda key: False,
        concurrency: int = CONCURRENCY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue: WorkQueue[K] = WorkQueue(is_new, max(1, concurrency // 2))
        self._work = work
        self._on_failure = on_failure
        self._concurrency = concurrency
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], K] = {}
        self._wake = asyncio.Event()
        self._open = False

    def add(self, key: K, delay: float = 0.0) -> None:
        """Queue `key` after `delay` seconds."""
        self.queue.add(key, self._clock(), delay)
        self._wake.set()

    def open(self) -> None:
        """Start to work, without the pauses of earlier failures."""
        self.queue.end_pauses(self._clock())
        self._open = True
        self._wake.set()

    async def close(self) -> None:
        """Stop to work: cancel current work and queue its keys again. Returns when no work is left."""
        self._open = False
        tasks = dict(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def is_open(self) -> bool:
        """Whether keys are processed."""
        return self._open

    def count_ready(self) -> int:
        """Return the number of ready keys."""
        return self.queue.count_ready(self._clock())

    def age(self) -> float:
        """Return the seconds that the oldest ready key has waited; 0 while closed, because keys then wait by design."""
        return self.queue.age(self._clock()) if self._open else 0.0

    def standstill(self) -> float:
        """Return the seconds for which keys have been ready without a worker taking one; 0 while closed."""
        return self.queue.standstill(self._clock()) if self._open else 0.0

    def longest_work(self) -> float:
        """Return the seconds since the oldest current work started."""
        return self.queue.longest_work(self._clock())

    async def run(self) -> None:
        """Start work on ready keys until cancelled."""
        try:
            while True:
                # Clear the event before looking at the queue: a key added in between sets it again, so that no wake-up is lost.
                self._wake.clear()
                while self._open and len(self._tasks) < self._concurrency:
                    key = self.queue.pop(self._clock())
                    if key is None:
                        break
                    task = asyncio.create_task(self._work_on(key), name=f"reconcile {key}")
                    self._tasks[task] = key
                    task.add_done_callback(self._finish_task)
                due = self.queue.next_due()
                timeout = None if due is None or not self._open else max(0.0, due - self._clock())
                if timeout is not None and len(self._tasks) >= self._concurrency:
                    timeout = None  # the end of a task sets the event
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), timeout)
        finally:
            await self.close()

    async def _work_on(self, key: K) -> None:
        try:
            await self._work(key)
        except Exception as error:
            self._on_failure(key, error, self.queue.record_failure(key, self._clock()))
        else:
            self.queue.record_success(key, self._clock())

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        key = self._tasks.pop(task)
        if task.cancelled():  # possibly before its first line ran, so `_work_on` cannot handle it
            self.queue.record_success(key, self._clock())
            self.queue.add(key, self._clock())
        self._wake.set()
