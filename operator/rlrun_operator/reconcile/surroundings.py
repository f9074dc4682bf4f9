"""Clients, caches and callbacks that the queues of an operator share."""

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
    """Clients, caches and callbacks of a queue."""

    client: Client
    store: Store
    feed: Feed
    look_ups: LookUps
    namespaces: tuple[str, ...]
    """Namespaces that the operator serves; empty: all."""
    serves: Callable[[Manifest], bool]
    """Returns whether this operator manages a run."""
    is_active: Callable[[], bool]
    """Returns whether this process acts on runs now (it is the leader)."""
    again: Callable[[Key, float], None]
    """`again(key, seconds)` queues a pass over a run."""
    now: Callable[[], float] = time.time
    """Seconds since the epoch."""
    clock: Callable[[], float] = time.monotonic
    """Steady seconds."""
