"""Engines as their orchestrator sees them: a changing load, its measurement, and drains of surplus engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlrun.protocol.messages import lease_annotations as keys
from rlrun.protocol.messages.lease_annotations import EngineLoad, SpotWish
from rlrun_operator.names import SPOT_LABEL
from tests.sim.cluster.api import Json
from tests.sim.cluster.pods import is_up

STEP_SECONDS = 1.0


@dataclass(frozen=True)
class Sample:
    """Load shares of some seconds, like `EngineLoad`."""

    seconds: float
    waited: float
    idle: float


@dataclass
class Fleet:
    """Engines of one orchestrator, which changes with each attempt."""

    demand: float = 2.0
    """Number of engines that would be busy all the time without waits of the trainer."""
    attempt: int = 0
    drained: tuple[str, ...] = ()
    """Addresses of engines in the last report that are not used any more."""
    reports: deque[tuple[float, EngineLoad]] = field(default_factory=lambda: deque(maxlen=300))
    """Latest samples with their times."""
    _draining: list[str] = field(default_factory=list)
    _used: frozenset[str] = frozenset()
    _samples: list[Sample] = field(default_factory=list)
    _at: float | None = None

    def report(self, attempt: int, pods: Iterable[Json], wishes: Mapping[str, str], now: float) -> dict[str, str]:
        """Return the Lease's annotations about engines.

        Args:
            attempt: attempt of the reporting orchestrator.
            pods: engine pods.
            wishes: annotations of the operator.
            now: steady seconds.
        """
        if attempt != self.attempt:
            self.attempt, self._draining, self._samples, self._at = attempt, [], [], None
        known = {address_of(pod): SPOT_LABEL in pod["metadata"]["labels"] for pod in pods if is_ready(pod)}
        drained = [
            address for address in self._draining if address in known
        ]  # draining since an earlier report, so they have no requests
        self._draining = self._chosen(known, wishes)
        self.drained = tuple(address for address in drained if address in self._draining)
        used = frozenset(known) - frozenset(self._draining)
        if used != self._used or self._at is None:
            self._used, self._samples, self._at = used, [], now
        n, window = len(used), float(wishes.get(keys.ENGINES_WINDOW, 60))
        if n and now > self._at:
            waited = max(0.0, 1 - n / self.demand)
            self._samples.append(Sample(now - self._at, waited, max(0.0, 1 - self.demand / n)))
        self._at = now
        told = {keys.ENGINES_DRAINED: " ".join(self.drained)}
        while self._samples and sum(one.seconds for one in self._samples[1:]) >= window:
            del self._samples[0]
        seconds = sum(one.seconds for one in self._samples)
        if not seconds:
            return told
        waited = sum(one.waited * one.seconds for one in self._samples) / seconds
        idle = sum(one.idle * one.seconds for one in self._samples) / seconds
        load = EngineLoad(
            engines=n,
            seconds=seconds,
            steps=int(seconds / STEP_SECONDS),
            waited=waited,
            ahead=idle,
            idle=idle,
            busy=1 - idle,
            requests=20.0,
            waiting=0.0,
        )
        self.reports.append((now, load))
        return told | {keys.ENGINES: load.text()}

    def _chosen(self, known: Mapping[str, bool], wishes: Mapping[str, str]) -> list[str]:
        """Return the engines to drain: the surplus of each kind of nodes, the last ones first."""
        if keys.ENGINES_WANTED not in wishes:
            return []
        wanted = int(wishes[keys.ENGINES_WANTED])
        spot = SpotWish.read(wishes[keys.ENGINES_SPOT]) if keys.ENGINES_SPOT in wishes else SpotWish(0, frozenset())
        result: list[str] = []
        for kind, number in ((True, spot.engines), (False, max(0, wanted - spot.engines))):
            some = [address for address in known if (address in spot.hosts) == kind]
            kept = [address for address in self._draining if address in some]
            surplus = max(0, len(some) - number)
            result += [*kept, *(address for address in reversed(some) if address not in kept)][:surplus]
        return result[: max(0, len(known) - 1)]  # the last engine in use stays


def is_ready(pod: Json) -> bool:
    """Whether an engine answers."""
    conditions = pod["status"].get("conditions") or ()
    return is_up(pod) and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def address_of(pod: Json) -> str:
    """Return the address of an engine's pod."""
    return str(pod["status"].get("podIP"))
