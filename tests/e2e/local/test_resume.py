"""Run whose roles are killed after checkpoints, compared bitwise with the undisturbed run.

It replays the recorded rollouts of the undisturbed run without an engine, because only roles with a state are killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages.lease_annotations import MEASURED, PREFIX
from tests.e2e.local.local_run import LocalRun, processes_of, small_quickstart
from tests.support.command_line import command_line
from tests.support.programs import wait_for

STEPS = 12
INTERVAL = 3
INTERRUPTED = 130
SPEC: dict[str, Any] = {
    "maxSteps": STEPS,
    "checkpoint": {"interval": INTERVAL, "keepLast": 3},
    "evaluation": None,
}


def find(run: LocalRun, *words: str) -> list[int]:
    """Return the run's processes whose command line contains all `words`; a new fork still has the command line of its
    parent.
    """
    found = {}
    for pid in processes_of(run.folder):
        line = command_line(pid)
        if all(word in line for word in words):
            found[pid] = line
    return [pid for pid, line in found.items() if found.get(_parent(pid)) != line]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended in the meantime
        return 0


def kill_a_rank(run: LocalRun) -> None:
    ranks = [pid for pid in find(run, "rlrun.trainer") if "rlrun.trainer.ranks.torchrun" not in command_line(pid)]
    os.kill(max(ranks), signal.SIGKILL)


def kill_torchrun(run: LocalRun) -> None:
    [pid] = find(run, "rlrun.trainer.ranks.torchrun")
    os.kill(pid, signal.SIGKILL)


def kill_the_engine(run: LocalRun) -> None:
    os.kill(min(find(run, "rlrun.inference")), signal.SIGKILL)


def kill_the_orchestrator(run: LocalRun) -> None:
    [pid] = find(run, "rlrun.orchestrator")
    os.kill(pid, signal.SIGKILL)


def kill_the_launcher(run: LocalRun) -> None:
    assert run.process is not None
    run.process.kill()


def nothing_is_left(run: LocalRun) -> None:
    wait_for(lambda: not processes_of(run.folder), "no process is left", state=lambda: processes_of(run.folder))


@pytest.mark.full
def test_killed_and_resumed_run_equals_undisturbed_run(new_run: Callable[..., LocalRun], learned: LocalRun) -> None:
    recorded = str(learned.folder / "rollouts")
    run = new_run(small_quickstart(model_folder=learned.folder / "model", **SPEC))
    faults = [kill_a_rank, kill_the_orchestrator, kill_the_launcher]
    for number, fault in enumerate(faults):
        run.start("--replay", recorded, *(["--resume"] if number else []))
        wanted = INTERVAL * (number + 1)
        run.wait_until(
            lambda wanted=wanted: any(a.step >= wanted for a in complete_checkpoints(RunPaths(run.folder))),
            f"checkpoint {wanted}",
        )
        assert not find(run, "rlrun.inference"), "nothing is sampled"
        fault(run)
        assert run.wait() != 0
        if fault is not kill_the_launcher:
            assert f"--output-dir {run.folder} --resume" in run.output
            assert processes_of(run.folder) == []
        nothing_is_left(run)
    run.start("--replay", recorded, "--resume")
    assert run.wait() == 0, run.output + run.tails()

    assert max(line["attempt"] for line in run.steps()) == len(faults) + 1
    keys = ("step", "loss", "grad_norm", "param_checksum", "reward/mean")
    expected = [tuple(line[key] for key in keys) for line in learned.steps()[:STEPS]]
    assert [tuple(line[key] for key in keys) for line in run.steps()] == expected
    assert [e[0] for e in expected] == list(range(1, STEPS + 1))
    starts = {line["attempt"]: line for line in run.steps() if f"{PREFIX}imports" in line}
    assert sorted(starts) == list(range(1, len(faults) + 2)), (
        "the first step of each attempt has the times of its start"
    )
    assert all(line[PREFIX + phase] > 0 for line in starts.values() for phase in MEASURED[:-1])


def press_ctrl_c(run: LocalRun) -> None:
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param(kill_the_engine, 1, marks=pytest.mark.full),
        (kill_torchrun, 1),
        pytest.param(press_ctrl_c, INTERRUPTED, marks=pytest.mark.full),
    ],
)
def test_early_end_leaves_no_processes(
    new_run: Callable[..., LocalRun], learned: LocalRun, fault: Callable[[LocalRun], None], code: int
) -> None:
    run = new_run(small_quickstart(model_folder=learned.folder / "model", **SPEC))
    run.start()
    run.wait_until(lambda: len(find(run, "rlrun.trainer")) >= 3 and bool(find(run, "rlrun.inference")), "all roles run")
    fault(run)
    assert run.wait() == code, run.output
    assert f"--output-dir {run.folder} --resume\n" in run.output
    nothing_is_left(run)
