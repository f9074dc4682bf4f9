"""Order of events at the start and the end of an orchestrator attempt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from orch_simulation import API_KEY, make_config

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator import attempt as attempt_module
from rlrun.orchestrator.attempt import TERMINATED, Stop, feed_trainer, open_attempt
from rlrun.orchestrator.progress.exposition import Measures
from rlrun.orchestrator.progress.progress_server import Progress, starting_progress
from rlrun.orchestrator.trainer.trainer_client import Since, Waiting
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes

STEPS = 7


def waits(since: Since) -> Waiting:
    return since.waiting("trainer", "slot")


class Lease:
    """Lease that records its renewals."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def run(self) -> None:
        self._events.append("first renewal")
        try:
            await asyncio.Event().wait()
        finally:
            self._events.append("no more renewals")

    async def farewell(self) -> None:
        self._events.append("last renewal")

    def stall(self) -> None:
        return None


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the recorded events, in order."""
    noted: list[str] = []
    monkeypatch.setattr(attempt_module, "lease_from_environment", lambda **_: Lease(noted))
    return noted


async def served(config: OrchestratorConfig) -> dict[str, Any]:
    """Return the progress document that the attempt serves."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{config.metrics_port}", headers=headers) as session,
        session.get("/rlrun/progress") as answer,
    ):
        document: dict[str, Any] = await answer.json()
        return document


class Work:
    """Stand-in for the flow, the trainer and the connection."""

    def __init__(
        self, config: OrchestratorConfig, volume: Volume, events: list[str], stop: Stop, *, done: bool
    ) -> None:
        self._config, self._volume, self._events, self._stop, self._done = config, volume, events, stop, done

    async def run(self) -> bool:
        assert (await served(self._config))["waiting_phase"] == "training", "the work's own progress is served"
        if not self._done:
            assert self._stop.act is not None
            self._stop.act()
        self._events.append("work is over")
        return self._done

    def stop(self) -> None:
        self._events.append("stopped")

    def leave(self) -> None:
        self._events.append("left")

    def progress(self) -> Progress:
        return starting_progress(Waiting("trainer", "training", 0.0), STEPS, self._volume)

    def measures(self) -> Measures:
        return Measures()

    async def shutdown(self) -> None:
        assert (await served(self._config))["max_steps"] == STEPS, "the progress is served to the end"
        self._events.append("the trainer ends")


@pytest.mark.parametrize("done", [True, False])
async def test_lease_renewal_ends_after_work_and_before_trainer_shutdown(
    tmp_path: Path, events: list[str], done: bool
) -> None:
    config, stop = make_config(tmp_path, tmp_path), Stop()
    opened = open_attempt(config, 1, API_KEY, waits=waits, total_steps=STEPS, least_bytes=0, stop=stop)
    async with opened as attempt:
        assert (await served(config))["waiting_phase"] == "slot"
        assert stop.act is None, "before there is work, a signal cancels everything"
        work: Any = Work(config, attempt.volume, events, stop, done=done)
        code = await feed_trainer(attempt, work, work, work, loaded=lambda: events.append("loaded"))
    middle = ["work is over", "last renewal", "the trainer ends"]
    if not done:
        middle = ["stopped", "left", "work is over", "last renewal"]
    assert events == ["first renewal", "loaded", *middle, "no more renewals"]
    assert code == (exit_codes.OK if done else TERMINATED)
    with pytest.raises(aiohttp.ClientConnectionError):
        await served(config)


async def test_background_error_ends_attempt_without_final_lease_renewal(tmp_path: Path, events: list[str]) -> None:
    async def fail() -> None:
        raise ValueError("beside")

    async def work() -> None:
        opened = open_attempt(config, 1, API_KEY, waits=waits, total_steps=STEPS, least_bytes=0, stop=None)
        async with opened as attempt:
            attempt.background(fail())
            await asyncio.Event().wait()

    config = make_config(tmp_path, tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        await work()
    assert [str(error) for error in caught.value.exceptions] == ["beside"]
    assert events == ["first renewal", "no more renewals"], "an end that is none is not reported"
