"""`rlrun get`, `why`, `suspend` and other commands against a real API server, through this machine's kubectl."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controlplane.harness import wait_for
from tests.controlplane.world import World
from tests.processes.cli.test_cli_cpu import TIMED

COMMAND_SECONDS = 60.0
CPU_SECONDS = 1.0
"""CPU time of a command with all its kubectl processes; the best of a few tries counts."""
TRIES = 5


def rlrun(
    world: World, *words: str, module: str = "rlrun.cli.main", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `rlrun WORDS` in the world's namespace."""
    flags = ["--kubeconfig", str(world.cluster.kubeconfig), "-n", world.namespace]
    return subprocess.run(
        [sys.executable, "-m", module, *words, *flags],
        capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False, env=world.cluster.environment, cwd=cwd,
    )  # fmt: skip


def run_successfully(world: World, *words: str) -> str:
    """Return the output of a successful command on one line."""
    done = rlrun(world, *words)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_get_why_and_status_explain_runs(world: World) -> None:
    world.start("a", step=7)
    world.create("b", trainer={"nodeSelector": {"nowhere": "yes"}})
    wait_for(lambda: world.status("b"), lambda s: s.get("reason") == "Unschedulable", "b finds no node")
    found = {run["name"]: run for run in json.loads(rlrun(world, "get", "-o", "json").stdout)}
    assert (found["a"]["phase"], found["b"]["reason"]) == ("Running", "Unschedulable")
    text = run_successfully(world, "why", "b")
    assert "Scheduled: Unschedulable" in text
    assert "trainer needs 1 pod" in text
    assert "Free the resources in the message" in text
    text = run_successfully(world, "status", "a")
    assert "Running (Training)" in text
    assert "7/100" in text
    assert "could not be read" not in text
    plugin = rlrun(world, "why", "b", module="rlrun.cli.kubectl_plugin")
    assert (plugin.returncode, "Unschedulable" in plugin.stdout) == (0, True), plugin.stderr
    missing = rlrun(world, "why", "none")
    assert (missing.returncode, "there is no run none" in missing.stderr) == (64, True), missing.stderr


@pytest.mark.full
def test_set_scale_restart_and_suspend_change_run(world: World) -> None:
    world.start("a", step=7)
    run_successfully(world, "scale", "a", "--inference", "2")
    run_successfully(world, "set", "a", "maxSteps=200")
    spec = world.run("a")["spec"]
    assert (spec["inference"]["replicas"], spec["maxSteps"]) == (2, 200)
    unknown = rlrun(world, "set", "a", "inference.replica=3")
    assert unknown.returncode == 64, unknown.stderr
    assert "spec.inference.replica" in unknown.stderr
    frozen = rlrun(world, "set", "a", "seqLen=128")
    assert (frozen.returncode, "frozen" in frozen.stderr) == (78, True), frozen.stderr
    run_successfully(world, "restart", "a")
    world.wait_phase("a", "Starting", attempt=2)
    run_successfully(world, "suspend", "a")
    world.wait_phase("a", "Suspended")
    run_successfully(world, "resume", "a")
    world.wait_phase("a", "Starting", attempt=3)


ANSWERS: list[tuple[str, int, str]] = [
    ("get -o wide", 0, "TOK/GPU-H"),
    ("status new", 0, "Suspended"),
    ("status neww", 64, "(did you mean new?)"),
    ("why new", 0, "Suspended"),
    ("watch none", 64, "there is no run none"),
    ("cost new", 0, "HOURS"),
    ("set new maxSteps=200", 0, "new is changed"),
    ("scale new --inference 2", 0, "new"),
    ("suspend new", 0, "new"),
    ("resume trains", 0, "trains"),
    ("restart new", 0, "new"),
    ("replay new --step 1", 64, "is a run in a cluster"),
    ("fork new", 64, "is a run in a cluster"),
    ("logs trains", 1, "connection refused"),
    ("rollouts trains --step 7", 69, "kubectl exec failed"),
    ("pull trains metrics --to copy", 69, "kubectl exec failed"),
    ("put none.jsonl trains", 64, "none.jsonl"),
    ("compare trains trains", 69, "kubectl exec failed"),
    ("plot trains --svg curve.svg", 69, "kubectl exec failed"),
    ("debug trains --file bundle.tar.gz", 0, "bundle.tar.gz: "),
]
"""Words of a command, its exit code and its expected output. Without kubelets there is no volume and no log."""
MORE_SECONDS = {"debug": 2.0}
"""CPU limits of expensive commands, which read events, pods and their logs."""
IN_A_CLUSTER = {*TIMED, "fork", "replay"} - {"completion", "version", "charts", "env"}


def measure_cpu(world: World, folder: Path, row: tuple[str, int, str], most: float) -> float:
    """Return the CPU seconds of a command: the first try below `most`, else the best of all tries."""
    words, code, said = row
    best = float("inf")
    for _ in range(TRIES):
        for left in folder.iterdir():
            left.unlink()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = rlrun(world, *words.split(), cwd=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best <= most:
            break
    return best


def test_every_run_command_has_a_case() -> None:
    assert {words.split()[0] for words, _, _ in ANSWERS} == IN_A_CLUSTER


@pytest.mark.full
def test_commands_stay_within_cpu_limit(world: World, tmp_path: Path) -> None:
    world.create("new", suspend=True)
    world.wait_phase("new", "Suspended")
    world.start("trains", step=7)
    slow = {}
    for row in ANSWERS:
        most = MORE_SECONDS.get(row[0].split()[0], CPU_SECONDS)
        if (took := measure_cpu(world, tmp_path, row, most)) > most:
            slow[row[0]] = f"{took:.2f} s"
    assert slow == {}
