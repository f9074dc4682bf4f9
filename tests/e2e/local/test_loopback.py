"""Listening addresses of a local run: only the loopback interface."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest

from rlrun.pod.role_process import descendant_pids
from tests.e2e.local.local_run import LocalRun, quickstart
from tests.support.command_line import command_line

STEPS = 3


def beyond_loopback(addresses: set[str]) -> set[str]:
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}


def test_quickstart_listens_on_loopback_only(learned: LocalRun) -> None:
    assert learned.listened
    assert beyond_loopback(learned.listened) == set()


@pytest.mark.full
def test_distributed_run_listens_on_loopback_only(new_run: Callable[..., LocalRun]) -> None:
    run = new_run(
        quickstart(
            maxSteps=STEPS,
            trainer={"replicas": 2},
            weightSync={"transport": "NCCL"},
            evaluation=None,
            checkpoint={"enabled": False},
        )
    )
    run.start()
    run.wait_until(lambda: (run.folder / "metrics.jsonl").is_file() and len(run.steps()) >= 1, "a step")
    assert run.process is not None
    pids = [run.process.pid, *descendant_pids(run.process.pid)]
    commands = " ".join(command_line(pid) for pid in pids)
    assert [
        role
        for role in ("rlrun.trainer.ranks.torchrun", "rlrun.inference", "rlrun.orchestrator")
        if role not in commands
    ] == []
    run.note_listeners()
    assert run.listened
    assert beyond_loopback(run.listened) == set()
    assert run.wait() == 0
