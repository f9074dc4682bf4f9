"""`rlrun get`, `why`, `suspend` and their like against a real API server, by the kubectl of this machine."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.world import World

COMMAND_SECONDS = 60.0
CPU_SECONDS = 1.0
"""Time of a command with all kubectl that it starts: the best of a few tries."""
TRIES = 5


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """One node."""
    names = cluster.add_fake_nodes(1, gpus=8, prefix="seen")
    yield names
    cluster.kubectl("delete", "node", *names)


def rlrun(world: World, *words: str, module: str = "rlrun.cli.main") -> subprocess.CompletedProcess[str]:
    """`rlrun WORDS` in the world's namespace."""
    flags = ["--kubeconfig", str(world.cluster.kubeconfig), "-n", world.namespace]
    return subprocess.run(
        [sys.executable, "-m", module, *words, *flags],
        capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False, env=world.cluster.environment,
    )  # fmt: skip


def told(world: World, *words: str) -> str:
    """Output of a command that succeeds, on one line."""
    done = rlrun(world, *words)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_a_run_is_found_and_explained(world: World) -> None:
    world.start("a", step=7)
    world.create("b", trainer={"nodeSelector": {"nowhere": "yes"}})
    wait_for(lambda: world.status("b"), lambda s: s.get("reason") == "Unschedulable", "b finds no node")
    found = {run["name"]: run for run in json.loads(rlrun(world, "get", "-o", "json").stdout)}
    assert (found["a"]["phase"], found["b"]["reason"]) == ("Running", "Unschedulable")
    text = told(world, "why", "b")
    assert "Scheduled: Unschedulable" in text
    assert "trainer needs 1 pod" in text
    assert "Free what the message says is short" in text
    text = told(world, "status", "a")
    assert "Running (Training)" in text
    assert "7/100" in text
    assert "could not be read" not in text
    plugin = rlrun(world, "why", "b", module="rlrun.cli.runs.plugin")
    assert (plugin.returncode, "Unschedulable" in plugin.stdout) == (0, True), plugin.stderr
    missing = rlrun(world, "why", "none")
    assert (missing.returncode, "there is no run none" in missing.stderr) == (64, True), missing.stderr


def test_a_run_is_changed(world: World) -> None:
    world.start("a", step=7)
    told(world, "scale", "a", "--inference", "2")
    told(world, "set", "a", "maxSteps=200")
    spec = world.run("a")["spec"]
    assert (spec["inference"]["replicas"], spec["maxSteps"]) == (2, 200)
    unknown = rlrun(world, "set", "a", "inference.replica=3")
    assert unknown.returncode == 64, unknown.stderr
    assert "spec.inference.replica" in unknown.stderr
    frozen = rlrun(world, "set", "a", "seqLen=128")
    assert (frozen.returncode, "frozen" in frozen.stderr) == (78, True), frozen.stderr
    told(world, "restart", "a")
    world.wait_phase("a", "Starting", attempt=2)
    told(world, "suspend", "a")
    world.wait_phase("a", "Suspended")
    told(world, "resume", "a")
    world.wait_phase("a", "Starting", attempt=3)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("cost", "a"), 0, "HOURS"),
        (("get", "-o", "wide"), 0, "TOK/GPU-H"),
        (("watch", "none"), 64, "there is no run none"),
        (("replay", "a", "--step", "1"), 64, "is a run in a cluster"),
        (("fork", "a"), 64, "is a run in a cluster"),
        (("status", "aa"), 64, "(did you mean a?)"),
    ],
)
def test_a_command_answers_in_a_second_of_its_own(world: World, words: tuple[str, ...], code: int, said: str) -> None:
    world.create("a", suspend=True)
    best = float("inf")
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = rlrun(world, *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best <= CPU_SECONDS:
            return
    raise AssertionError(f"{best:.2f} s of CPU")
