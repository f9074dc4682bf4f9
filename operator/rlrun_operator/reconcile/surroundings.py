"""Sources and sinks of the queues of an operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rlrun_operator.kube.client import Client
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.state import Manifest


@dataclass(frozen=True)
class Cluster:
    """Surroundings of a queue."""

    client: Client
    store: Store
    feed: Feed
    look_ups: LookUps
    namespaces: tuple[str, ...]
    """Namespaces that the operator serves; none: all."""
    serves: Callable[[Manifest], bool]
    """True if this operator looks after a run."""
    is_active: Callable[[], bool]
    """True if this process acts on runs now."""
    again: Callable[[Key, float], None]
    """`again(key, seconds)` queues a pass over a run."""
    now: Callable[[], float] = time.time
    """Seconds since the epoch."""
    clock: Callable[[], float] = time.monotonic
    """Steady seconds."""
