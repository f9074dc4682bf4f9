"""HTTP server for /livez, /readyz and /metrics on one port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlrun.runtime.site import Site

STANDSTILL_SECONDS = 60.0
"""Seconds without a taken run after which waiting workers count as hanging. The wait of one run proves nothing: new runs may queue."""
WORK_SECONDS = 180.0
"""Seconds after which work on one run counts as hanging: each of its requests has a deadline of seconds."""
LAG_SECONDS = 5.0
"""Delay, in seconds, of the event loop's once-a-second beat that counts as a fault. A loop that is blocked completely does not answer at
all, which the kubelet also treats as a failed probe."""


@dataclass
class Health:
    """Inputs of the probes, set by the process."""

    standstill: Callable[[], float] = lambda: 0.0
    """Seconds for which runs have waited without a worker taking one."""
    longest_work: Callable[[], float] = lambda: 0.0
    """Seconds since the oldest current work started."""
    lag: Callable[[], float] = lambda: 0.0
    """Largest delay of the event loop in the last minute, in seconds."""
    dead: Callable[[], list[str]] = list
    """Watches that do not recover."""
    stands_by: Callable[[], str | None] = lambda: None
    """Process that leads instead of this one, or None."""
    served_by_others: Callable[[], list[str]] = list
    """Configured namespaces that another operator serves."""
    not_ready: Callable[[], list[str]] = lambda: ["starting"]
    """Reasons why the store is not a complete copy of the cluster yet."""
    before_scrape: list[Callable[[], None]] = field(default_factory=list)

    def find_faults(self) -> list[str]:
        """Return the reasons to restart the process; empty if it is healthy."""
        problems = []
        if self.standstill() > STANDSTILL_SECONDS:
            problems.append(
                f"runs wait and no worker has taken one for {self.standstill():.0f} s (limit {STANDSTILL_SECONDS:.0f} s)"
            )
        if self.longest_work() > WORK_SECONDS:
            problems.append(f"work on a run takes {self.longest_work():.0f} s (limit {WORK_SECONDS:.0f} s)")
        if self.lag() > LAG_SECONDS:
            problems.append(f"the event loop was blocked for {self.lag():.1f} s (limit {LAG_SECONDS:g} s)")
        return problems + self.dead()


async def serve_health(health: Health, registry: CollectorRegistry, port: int) -> Site:
    """Start to serve on all interfaces; `close()` of the result stops it.

    Raises:
        OSError: the port is in use.
    """

    def respond(problems: list[str], well: str = "ok") -> web.Response:
        return web.Response(status=503 if problems else 200, text="\n".join(problems or [well]) + "\n")

    async def livez(_: web.Request) -> web.Response:
        return respond(health.find_faults())

    async def readyz(_: web.Request) -> web.Response:
        leader = health.stands_by()
        well = f"ok, standing by: {leader} leads" if leader else "ok"
        return respond(health.not_ready() + health.find_faults(), "\n".join([well, *health.served_by_others()]))

    async def metrics(_: web.Request) -> web.Response:
        for refresh in health.before_scrape:
            refresh()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    site = Site(app)
    await site.start(None, port)
    return site
