"""HTTP on one port: /livez, /readyz and /metrics. No check is a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlrun.runtime.site import Site

STANDSTILL_SECONDS = 60.0
"""Workers that take none of the waiting runs for so long hang. How long a run waits says nothing: a thousand that come at once wait."""
WORK_SECONDS = 180.0
"""A piece of work that takes longer hangs too: each of its requests has a deadline of seconds."""
LAG_SECONDS = 5.0
"""An event loop that came to its once-a-second beat so much later stands still too often. One that stands still altogether does not
answer at all, which is red to the kubelet, too."""


@dataclass
class Health:
    """Inputs of the answers; the process fills them in."""

    standstill: Callable[[], float] = lambda: 0.0
    """Seconds for which runs have waited and no worker has taken one."""
    longest_work: Callable[[], float] = lambda: 0.0
    """Seconds that the oldest piece of work is under way."""
    lag: Callable[[], float] = lambda: 0.0
    """Greatest delay of the event loop in the last minute, in seconds."""
    dead: Callable[[], list[str]] = list
    """Watches that are not coming back."""
    stands_by: Callable[[], str | None] = lambda: None
    """The process that leads in place of this one."""
    served_by_others: Callable[[], list[str]] = list
    """Namespaces that this operator is set to serve, and another one does."""
    not_ready: Callable[[], list[str]] = lambda: ["starting"]
    """Parts that are missing until the store is a true picture of the cluster."""
    before_scrape: list[Callable[[], None]] = field(default_factory=list)

    def sick(self) -> list[str]:
        """Reason to restart the process; empty: there is none."""
        problems = []
        if self.standstill() > STANDSTILL_SECONDS:
            problems.append(
                f"runs wait and no worker has taken one for {self.standstill():.0f} s (limit {STANDSTILL_SECONDS:.0f} s)"
            )
        if self.longest_work() > WORK_SECONDS:
            problems.append(f"work on a run takes {self.longest_work():.0f} s (limit {WORK_SECONDS:.0f} s)")
        if self.lag() > LAG_SECONDS:
            problems.append(f"the event loop stood still for {self.lag():.1f} s (limit {LAG_SECONDS:g} s)")
        return problems + self.dead()


async def serve_health(health: Health, registry: CollectorRegistry, port: int) -> Site:
    """Begin to serve on all interfaces; `close()` of the result ends it.

    Raises:
        OSError: the port is taken.
    """

    def verdict(problems: list[str], well: str = "ok") -> web.Response:
        return web.Response(status=503 if problems else 200, text="\n".join(problems or [well]) + "\n")

    async def livez(_: web.Request) -> web.Response:
        return verdict(health.sick())

    async def readyz(_: web.Request) -> web.Response:
        leader = health.stands_by()
        well = f"ok, standing by: {leader} leads" if leader else "ok"
        return verdict(health.not_ready() + health.sick(), "\n".join([well, *health.served_by_others()]))

    async def metrics(_: web.Request) -> web.Response:
        for refresh in health.before_scrape:
            refresh()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    site = Site(app)
    await site.start(None, port)
    return site
