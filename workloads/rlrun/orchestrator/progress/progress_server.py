"""HTTP server of the run's progress: Prometheus metrics, and a JSON document for the live view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from rlrun.orchestrator.progress.exposition import Measures, StepTotals, metrics_text
from rlrun.orchestrator.trainer.trainer_client import Waiting
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.volume_faults import Trouble, Volume
from rlrun.protocol.messages.endpoints import (
    ORCHESTRATOR_HEALTH,
    ORCHESTRATOR_METRICS,
    ORCHESTRATOR_PROGRESS,
    ORCHESTRATOR_READY,
    holds_key,
)
from rlrun.protocol.messages.lease_annotations import start_times
from rlrun.runtime import exit_codes
from rlrun.runtime.http_site import Site

_STEPS_FOR_ETA = 20


@dataclass(frozen=True)
class Progress:
    """State of the run at one moment."""

    step: int | None
    """Last trained step; None before the start of the attempt is known."""
    max_steps: int
    policy_version: int | None
    """Newest version that an engine holds."""
    checkpoint_step: int | None
    """Step of the newest complete checkpoint."""
    resumed_from_step: int | None
    """Step of the checkpoint from which the attempt started; None if it started from the model."""
    reward: float | None
    """Mean reward of the last trained step."""
    eval: dict[str, float]
    """Latest held-out mean reward per environment."""
    tokens_per_second: float | None
    """Tokens trained per second in the last step."""
    staleness_mean: float | None
    """Mean age of the tokens of the last step, in versions behind the trained policy."""
    waiting_on: str
    """Reason why the next step waits."""
    eta_seconds: float | None
    in_flight: int
    """Rollouts in flight."""
    errors: int
    """Rollouts that ended in an error since the start of the run."""
    readmitted: int = 0
    """Finished rollouts reused by restarts since the start of the run."""
    discarded: int = 0
    """Finished rollouts lost by restarts since the start of the run."""
    waiting_role: str | None = None
    """Role that the next step waits for."""
    waiting_phase: str | None = None
    """Current activity of that role."""
    waiting_since: float | None = None
    """Start of the wait, in seconds since the epoch."""
    activity: int = 0
    """Progress counter, see `Activity`."""
    storage: Trouble | None = None
    """Current problem of the volume."""
    engine_load: dict[str, float] | None = None
    """Load of the engines over the last steps, by the names of `EngineLoad`; None before the first measurement."""
    engines_drained: tuple[str, ...] | None = None
    """Addresses of drained, unused engines; None if the task drains no engines."""
    start_seconds: dict[str, float] | None = None
    """Seconds of the attempt's start by phase, after its first trained step (`messages.lease_annotations`)."""
    tokens: int | None = None
    """Tokens trained by the run, without the steps lost by restarts; None if nothing is trained."""
    samples: int | None = None
    """Samples trained by the run, counted like `tokens`."""
    results: tuple[str, ...] = ()
    """Results of an evaluation: one line per policy and environment."""


def starting_progress(waiting: Waiting, max_steps: int, volume: Volume) -> Progress:
    """Return the progress before the start of the attempt is known."""
    trouble = volume.trouble()
    return Progress(
        step=None,
        max_steps=max_steps,
        policy_version=None,
        checkpoint_step=None,
        resumed_from_step=None,
        reward=None,
        eval={},
        tokens_per_second=None,
        staleness_mean=None,
        waiting_on=waiting_reason(waiting, trouble),
        eta_seconds=None,
        in_flight=0,
        errors=0,
        waiting_role=waiting.role,
        waiting_phase=waiting.phase,
        waiting_since=waiting.since,
        storage=trouble,
    )


def waiting_reason(waiting: Waiting, trouble: Trouble | None) -> str:
    """Return the reason for waiting, or the volume's problem if it blocks the run."""
    return trouble.text if trouble is not None and trouble.blocks else str(waiting)


class StepClock:
    """Seconds per step over the last steps, and sums over all steps."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.start: dict[str, float] | None = None
        """Seconds of the attempt's start by phase; None before the first trained step or if the trainer does not
        measure it.
        """
        self._marks: deque[tuple[int, float]] = deque(maxlen=_STEPS_FOR_ETA + 1)

    def trained(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Record that a step has finished now.

        Args:
            step: number of the step.
            metrics: metrics of the trainer. None: the steps are answers of an evaluation, and nothing is trained.
        """
        self._marks.append((step, time.monotonic()))
        if metrics is not None:
            self.totals.trained(metrics)
            self.start = self.start or start_times(metrics)

    def remaining_seconds(self, max_steps: int) -> float | None:
        """Estimate the seconds to the last step; None before two steps have finished."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (max_steps - last) * (ended - began) / (last - first)


class ProgressServer:
    """Server of `GET /health`, `/ready` and `/metrics` without a key, and of `GET /rlrun/progress` with the run's key.

    Args:
        host: address to bind.
        port: port to bind.
        api_key: key of the run.
        look: reader of the current progress.
        stall: reader of the reason why the orchestrator is not ready; its result is None if it is ready.
        measures: reader of the other values for the metrics.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        api_key: str,
        look: Callable[[], Progress],
        stall: Callable[[], str | None] = lambda: None,
        measures: Callable[[], Measures] = Measures,
    ) -> None:
        self._host, self._port, self._key, self._look, self._stall = host, port, api_key, look, stall
        self._measures = measures
        self._site: Site | None = None

    async def __aenter__(self) -> ProgressServer:
        """Start the server.

        Raises:
            RoleError: the port is in use.
        """
        application = web.Application()
        application.router.add_get(ORCHESTRATOR_HEALTH, self._serve_health)
        application.router.add_get(ORCHESTRATOR_READY, self._serve_readiness)
        application.router.add_get(ORCHESTRATOR_METRICS, self._serve_metrics)
        application.router.add_get(ORCHESTRATOR_PROGRESS, self._serve_progress)
        self._site = Site(application)
        try:
            await self._site.start(self._host, self._port)
        except OSError as error:
            raise RoleError(
                f"orchestrator.metricsPort: cannot listen on {self._host}:{self._port}: {error.strerror}; choose a free port",
                exit_codes.UNAVAILABLE,
            ) from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._site is not None:
            await self._site.close()

    async def _serve_health(self, request: web.Request) -> web.Response:
        return web.json_response({"healthy": True})

    async def _serve_readiness(self, request: web.Request) -> web.Response:
        stall = self._stall()
        return web.json_response({"ready": stall is None, "reason": stall}, status=200 if stall is None else 503)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        progress = self._look()
        trouble = progress.storage.reason if progress.storage is not None else None
        body = metrics_text(progress, self._measures(), trouble)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _serve_progress(self, request: web.Request) -> web.Response:
        if not holds_key(request.headers.getall("Authorization", ()), self._key):
            return web.json_response({"error": "wrong or missing API key"}, status=401)
        return web.json_response(asdict(self._look()))
