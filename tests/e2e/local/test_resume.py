"""A run whose roles are killed, each right after a checkpoint, equals the undisturbed one, step by step and bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.manifest import complete_checkpoints
from rlrun.protocol.paths import RunPaths
from tests.e2e.local.local_run import LocalRun, processes_of, quickstart

pytestmark = pytest.mark.timeout(1200)

STEPS = 16
INTERVAL = 4
INTERRUPTED = 130
SPEC: dict[str, Any] = {
    "model": {"tiny": {}, "dtype": "float32"},  # what it has learned before does not matter here
    "maxSteps": STEPS,
    "checkpoint": {"interval": INTERVAL, "keepLast": 3},
    "evaluation": None,
    "orchestrator": {"batchSize": 64, "recordRollouts": True},
}


def find(run: LocalRun, *words: str) -> list[int]:
    """Processes of the run whose command line holds all `words`."""
    found = []
    for pid in processes_of(run.folder):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if all(word in line for word in words):
            found.append(pid)
    return found


def kill_a_rank(run: LocalRun) -> None:
    ranks = [
        pid
        for pid in find(run, "rlrun.trainer")
        if "rlrun.trainer.torchrun" not in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(max(ranks), signal.SIGKILL)


def kill_torchrun(run: LocalRun) -> None:
    [pid] = find(run, "rlrun.trainer.torchrun")
    os.kill(pid, signal.SIGKILL)


def kill_the_engine(run: LocalRun) -> None:
    os.kill(min(find(run, "rlrun.inference")), signal.SIGKILL)


def kill_the_orchestrator(run: LocalRun) -> None:
    [pid] = find(run, "rlrun.orchestrator")
    os.kill(pid, signal.SIGKILL)


def kill_the_launcher(run: LocalRun) -> None:
    assert run.process is not None
    run.process.kill()


def test_killed_and_resumed_equals_undisturbed(new_run: Callable[..., LocalRun]) -> None:
    undisturbed = new_run(quickstart(**SPEC))
    undisturbed.run()
    recorded = str(undisturbed.folder / "rollouts")

    run = new_run(quickstart(**SPEC))
    faults = [kill_a_rank, kill_the_orchestrator, kill_the_engine]
    for number, fault in enumerate(faults):
        run.start("--replay", recorded, *(["--resume"] if number else []))
        wanted = INTERVAL * (number + 1)
        run.wait_until(
            lambda wanted=wanted: any(a.step >= wanted for a in complete_checkpoints(RunPaths(run.folder))),
            f"checkpoint {wanted}",
        )
        fault(run)
        assert run.wait(120) != 0
        assert "go on with" in run.output
        assert processes_of(run.folder) == []
    run.start("--replay", recorded, "--resume")
    assert run.wait() == 0, run.output + run.tails()

    assert max(line["attempt"] for line in run.steps()) == len(faults) + 1
    keys = ("step", "loss", "grad_norm", "param_checksum", "reward/mean")
    expected = [tuple(line[key] for key in keys) for line in undisturbed.steps()]
    assert [tuple(line[key] for key in keys) for line in run.steps()] == expected
    assert [e[0] for e in expected] == list(range(1, STEPS + 1))


def press_ctrl_c(run: LocalRun) -> None:
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("fault", "code"), [(kill_the_launcher, -signal.SIGKILL), (kill_torchrun, 1), (press_ctrl_c, INTERRUPTED)]
)
def test_nothing_is_left_when_it_ends_early(
    new_run: Callable[..., LocalRun], fault: Callable[[LocalRun], None], code: int
) -> None:
    run = new_run(quickstart(**SPEC))
    run.start()
    run.wait_until(lambda: len(find(run, "rlrun.trainer")) >= 3 and bool(find(run, "rlrun.inference")), "all roles run")
    fault(run)
    assert run.wait(120) == code, run.output
    if code != -signal.SIGKILL:
        assert f"--output-dir {run.folder} --resume`" in run.output
    deadline = time.monotonic() + 60
    while left := processes_of(run.folder):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)
