"""A tracker that hangs, dies, refuses or is full loses nothing: an MLflow server of the tests' own, which does all of it in turn."""

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


def test_whatever_a_tracker_does_its_curve_is_whole_in_the_end(server: Server, sink_of: Callable[..., SinkOf]) -> None:
    """All of it in one run, in mid-course; then the tracker is well again."""
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
    assert [r["uid"] for r in server.runs] == [UID]  # one run, however often it was begun
    assert server.status == "FINISHED"
    assert server.parameters["trainer.max_steps"] == "40"
    for said in (
        "rejected the request: 403 no; set MLFLOW_TRACKING_USERNAME",
        "no progress for 5 s",
        "507",
    ):
        assert said in log, log


def test_at_the_end_of_a_run_nobody_waits_for_a_tracker_that_is_down(
    server: Server, sink_of: Callable[..., SinkOf]
) -> None:
    sink = sink_of({"mlflow": {"uri": server.url}})
    server.mode = "refuses"
    process = sink.start()
    sink.run.step(1)
    wait_for(lambda: bool(server.failed))
    sink.finish()  # within a minute, and not when the tracker is well again
    assert process.returncode != 0
    server.mode = ""
    assert wait_for_exit(sink.start("--once")) == 0
    assert sorted(server.points) == sink.run.expected()


def test_a_sink_that_is_killed_is_started_again(
    server: Server, sink_of: Callable[..., SinkOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orphaned worker gives way to the new one."""
    monkeypatch.setattr("rlrun.tracking.sink_starter._PAUSE_SECONDS", 0.1)
    run = sink_of({"mlflow": {"uri": server.url}}).run
    root: Path = run.paths.root
    process = SinkProcess(run.paths.run_json, root, os.environ)
    try:
        run.step(1)
        process.keep()
        wait_for(lambda: len(server.points) == 1)
        assert process._process is not None
        first = process._process
        first.kill()
        first.wait()
        run.step(2)
        wait_for(lambda: process.keep() is None and len(server.points) == 2)
        assert process._process is not first
        run.step(3)
    finally:
        assert process.stop()
    assert sorted(server.points) == run.expected()


@pytest.mark.full
def test_w_and_bs_server_says_what_a_killed_sink_had_not_sent(
    sink_of: Callable[..., SinkOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb's own process takes rows while the server is down, and is killed with them."""
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
