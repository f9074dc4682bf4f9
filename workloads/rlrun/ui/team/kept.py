"""Values that are kept for a bounded time, and a bound on how often something may fail."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """Values by key, each until its time is over.

    Args:
        most: number of values; the oldest make room.
        clock: seconds that only go on.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        """The value of a key; None: there is none any more."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            if found[0] <= self._clock():
                del self._values[key]
                return None
            return found[1]

    def put(self, key: Key, value: Value, seconds: float) -> None:
        """Keep a value for so long."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = (self._clock() + seconds, value)
            while len(self._values) > self._most:
                self._values.popitem(last=False)

    def drop(self, key: Key) -> None:
        """Keep it no longer."""
        with self._lock:
            self._values.pop(key, None)


class Limit:
    """A bound on how often one peer may fail: `burst` times at once, and once more after each `seconds`.

    Args:
        burst: failures at once.
        seconds: time after which one more is allowed.
        clock: seconds that only go on.
        peers: peers that are remembered; the one that failed longest ago makes room.
    """

    def __init__(self, burst: int, seconds: float, clock: Callable[[], float], peers: int = 4096) -> None:
        self._burst, self._seconds, self._clock, self._peers = burst, seconds, clock, peers
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """When each peer has all its failures to spend again."""
        self._lock = Lock()

    def wait(self, peer: str) -> float:
        """Seconds until this peer may fail again; 0: now."""
        with self._lock:
            left = self._full_at.get(peer, 0.0) - self._clock()
            return max(0.0, left - (self._burst - 1) * self._seconds)

    def has_failed(self, peer: str) -> bool:
        """True if failures of a peer still count."""
        with self._lock:
            return self._full_at.get(peer, 0.0) > self._clock()

    def failed(self, peer: str) -> None:
        """Count a failure."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._full_at.pop(peer, now))
            self._full_at[peer] = begin + self._seconds
            while len(self._full_at) > self._peers:
                self._full_at.popitem(last=False)
