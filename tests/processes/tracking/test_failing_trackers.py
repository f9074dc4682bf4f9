"""Trackers that hang, die, refuse or are full: no record is lost, with an MLflow server of the tests that does all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlrun.tracking.sink_starter import SinkProcess
from tests.processes.tracking.conftest import SinkOf, needs
from tests.support.mlflow_server import Server
from tests.support.programs import wait_for, wait_for_exit
from tests.support.tracked_run import UID
from tests.support.wandb_server import WandbServer

MODES = ("refuses", "hangs", "dies", "full")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def test_failing_tracker_gets_a_complete_curve(server: Server, sink_of: Callable[..., SinkOf]) -> None:
    """All failures happen within one run; then the tracker recovers."""
    sink = sink_of({"mlflow": {"uri": server.url}})
    run = sink.run
    server.mode = MODES[0]
    sink.start("--patience", "5")
    step = 0
    for mode in MODES:
        server.mode = mode
        for _ in range(5):
            step += 1
            run.step(step)
        wait_for(lambda mode=mode: server.failed.get(mode, 0) > 0)  # type: ignore[misc]
        server.mode = ""
        wait_for(lambda step=step: len(server.points) >= step)  # type: ignore[misc]
    for step in range(21, 41):
        run.step(step)
    log = sink.finish()
    assert sorted(server.points) == run.expected()
    assert [r["uid"] for r in server.runs] == [UID]  # One run, however often the sink started.
    assert server.status == "FINISHED"
    assert server.parameters["trainer.max_steps"] == "40"
    for said in (
        "rejected the request: 403 no; set MLFLOW_TRACKING_USERNAME",
        "no progress for 5 s",
        "507",
    ):
        assert said in log, log


def test_end_of_run_does_not_wait_for_failed_tracker(server: Server, sink_of: Callable[..., SinkOf]) -> None:
    sink = sink_of({"mlflow": {"uri": server.url}})
    server.mode = "refuses"
    process = sink.start()
    sink.run.step(1)
    wait_for(lambda: bool(server.failed))
    sink.finish()  # Ends within a minute, before the tracker recovers.
    assert process.returncode != 0
    server.mode = ""
    assert wait_for_exit(sink.start("--once")) == 0
    assert sorted(server.points) == sink.run.expected()


def test_killed_sink_is_restarted(
    server: Server, sink_of: Callable[..., SinkOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orphaned worker ends in favor of the new one."""
    monkeypatch.setattr("rlrun.tracking.sink_starter._PAUSE_SECONDS", 0.1)
    run = sink_of({"mlflow": {"uri": server.url}}).run
    root: Path = run.paths.root
    process = SinkProcess(run.paths.run_json, root, os.environ)
    try:
        run.step(1)
        process.keep_running()
        wait_for(lambda: len(server.points) == 1)
        assert process._process is not None
        first = process._process
        first.kill()
        first.wait()
        run.step(2)
        wait_for(lambda: process.keep_running() is None and len(server.points) == 2)
        assert process._process is not first
        run.step(3)
    finally:
        assert process.stop()
    assert sorted(server.points) == run.expected()


@pytest.mark.full
def test_wandb_server_gets_records_of_killed_sink(
    sink_of: Callable[..., SinkOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb's own process accepts rows while the server is down, and is killed with them."""
    needs("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with WandbServer() as wandb:
        sink = sink_of({"wandb": {"baseUrl": wandb.url}, "samples": {"interval": 1000}})
        run = sink.run
        run.step(1)
        assert wait_for_exit(sink.start("--once")) == 0
        assert [row["step"] for row in wandb.rows] == [1]
        run.step(2)
        sink.start()
        wait_for(lambda: sink.sent("wandb") == 2)
        wandb.down = True
        for step in range(3, 8):
            run.step(step)
        wait_for(lambda: sink.sent("wandb") == 7)
        sink.kill()
        assert len(wandb.rows) < 7
        wandb.down = False
        run.begin(2, base_step=5)
        for step in range(6, 11):
            run.step(step)
        assert wait_for_exit(sink.start("--once")) == 0
        assert [row["_step"] for row in wandb.rows] == list(range(len(wandb.rows)))
        assert sorted({row["step"]: row["loss/mean"] for row in wandb.rows}.items()) == run.expected()
        assert wandb.run == UID
