"""Values with a limited lifetime, and a limit for the rate of failures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """Values by key, each with its own lifetime.

    Args:
        most: maximum number of values; the oldest are dropped.
        clock: monotonic clock in seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, or None if there is none or it has expired."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            if found[0] <= self._clock():
                del self._values[key]
                return None
            return found[1]

    def put(self, key: Key, value: Value, seconds: float) -> None:
        """Store a value for `seconds`."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = (self._clock() + seconds, value)
            while len(self._values) > self._most:
                self._values.popitem(last=False)

    def drop(self, key: Key) -> None:
        """Remove the value of a key."""
        with self._lock:
            self._values.pop(key, None)


class Limit:
    """Limit for the rate of failures of a peer: `burst` failures at once, then one more after each `seconds`.

    Args:
        burst: number of failures at once.
        seconds: time after which one more failure is allowed.
        clock: monotonic clock in seconds.
        peers: maximum number of stored peers; the one with the oldest failure is dropped.
    """

    def __init__(self, burst: int, seconds: float, clock: Callable[[], float], peers: int = 4096) -> None:
        self._burst, self._seconds, self._clock, self._peers = burst, seconds, clock, peers
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """Time at which each peer has its full burst again."""
        self._lock = Lock()

    def wait(self, peer: str) -> float:
        """Return the seconds until this peer may fail again; 0: now."""
        with self._lock:
            left = self._full_at.get(peer, 0.0) - self._clock()
            return max(0.0, left - (self._burst - 1) * self._seconds)

    def has_failed(self, peer: str) -> bool:
        """Return whether failures of a peer still count."""
        with self._lock:
            return self._full_at.get(peer, 0.0) > self._clock()

    def failed(self, peer: str) -> None:
        """Count a failure of a peer."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._full_at.pop(peer, now))
            self._full_at[peer] = begin + self._seconds
            while len(self._full_at) > self._peers:
                self._full_at.popitem(last=False)
