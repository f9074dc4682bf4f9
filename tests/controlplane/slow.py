"""An operator that is slow: `RLRUN_TEST_SLOW=0.3-1.5` shows which tests ask for what it has yet to write.

Each of its writes waits a random time of this many seconds before it is sent, and so does each event of a watch before it is taken in,
so that news of one kind overtakes that of another. The Leases by which operators agree who leads are left alone: an operator that is
late with those stops.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping
from typing import Any

SLOW = "RLRUN_TEST_SLOW"
"""Variable with the least and the most seconds before each write of an operator under test."""
MAIN = "from rlrun_operator.main import main; main()"
"""Program of the operator."""
ORDERED_SECONDS = 1e-4
"""Between two events of one kind, which stay in their order."""
_RANGE = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")


def program() -> str:
    """Program of the operator under test, slow where the variable asks for that."""
    if SLOW not in os.environ:
        return MAIN
    least, most = seconds(os.environ[SLOW])
    return f"from tests.controlplane.slow import slow_down; slow_down({least}, {most}); {MAIN}"


def patience() -> float:
    """How many times as long as usual a test waits for the operator."""
    return 4.0 if SLOW in os.environ else 1.0


def seconds(text: str) -> tuple[float, float]:
    """Least and most of a range.

    Raises:
        ValueError: it is none.
    """
    found = _RANGE.fullmatch(text)
    if found is None or float(found[1]) > float(found[2]):
        raise ValueError(f"{SLOW}: {text!r} is no range of seconds; write it like 0.5-2")
    return float(found[1]), float(found[2])


def slow_down(least: float, most: float) -> None:
    """Let every write of this process, and every event that it watches, wait `least` to `most` seconds."""
    from rlrun_operator.kube.client import Client
    from rlrun_operator.reconcile.cache_feed import Feed

    send = Client.request

    async def late(self: Client, method: str, verb: str, resource: str, path: str, **more: Any) -> Any:
        if more.get("write") and not _of_leadership(resource, path, more.get("body") or {}):
            await asyncio.sleep(random.uniform(least, most))
        return await send(self, method, verb, resource, path, **more)

    Client.request = late  # type: ignore[method-assign]
    take, due = Feed.on_object, dict[str, float]()

    def later(self: Feed, event: str | None, found: Mapping[str, Any]) -> None:
        if event is None:  # of a list, which is compared with what is known
            return take(self, event, found)
        loop, kind = asyncio.get_running_loop(), str(found["kind"])
        due[kind] = max(loop.time() + random.uniform(least, most), due.get(kind, 0.0) + ORDERED_SECONDS)
        loop.call_at(due[kind], take, self, event, found)
        return None

    Feed.on_object = later  # type: ignore[method-assign]


def _of_leadership(resource: str, path: str, body: Mapping[str, Any]) -> bool:
    name = path.rpartition("/")[2] if not path.endswith("/leases") else body["metadata"]["name"]
    return resource == "leases" and not name.endswith("-progress")
