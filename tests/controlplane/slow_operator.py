"""A slow operator for `tests.support.slow`.

Each write and each watch event is delayed, so that events of different kinds arrive in another order. The Leases of
leader election are not delayed: an operator that renews them late stops.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

ORDERED_SECONDS = 1e-4
"""Time between two events of one kind, which keep their order."""


def slow_down(least: float, most: float) -> None:
    """Delay every write and every watch event of this process by `least` to `most` seconds."""
    from rlrun_operator.kube.client import Call, Client
    from rlrun_operator.reconcile.cache_feed import Feed

    send = Client.request

    async def late(self: Client, call: Call, **more: Any) -> Any:
        if more.get("write") and not _of_leadership(call.resource, call.path, more.get("body") or {}):
            await asyncio.sleep(random.uniform(least, most))
        return await send(self, call, **more)

    Client.request = late  # type: ignore[method-assign]
    take, due = Feed.on_object, dict[str, float]()

    def later(self: Feed, event: str | None, found: Mapping[str, Any]) -> None:
        if event is None:  # an item of a list, which is compared with the cached object
            return take(self, event, found)
        loop, kind = asyncio.get_running_loop(), str(found["kind"])
        due[kind] = max(loop.time() + random.uniform(least, most), due.get(kind, 0.0) + ORDERED_SECONDS)
        loop.call_at(due[kind], take, self, event, found)
        return None

    Feed.on_object = later  # type: ignore[method-assign]


def _of_leadership(resource: str, path: str, body: Mapping[str, Any]) -> bool:
    name = path.rpartition("/")[2] if not path.endswith("/leases") else body["metadata"]["name"]
    return resource == "leases" and not name.endswith("-progress")
