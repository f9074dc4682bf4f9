"""Runs from small repositories of published shapes on a cluster: files on a claim, manifests, and results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.follow import outcome
from tests.e2e.cluster.kube_run import ROOT, KubeRun, example
from tests.support.small_repositories import (
    STEP_REPLAY,
    STEP_REPLAY_MISMATCH,
    make_gpt_oss,
    make_qwen3_5,
    make_qwen3_moe,
)

FLIPPED = ROOT / "tests/e2e/local/flipped.py"
"""Module with the flipped advantage. On the claim it is next to the repository."""
DATA = "/data/data"
"""Folder of the files of `rlrun put` in the pods."""
STEPS = 40
TASKS = 256
"""Tasks of an evaluation. The standard error of a mean reward is at most 0.016 (measured)."""
_FIRST_MISMATCH = re.compile(r"step 1: .*mismatch_kl ([-0-9.e]+)")


@dataclass(frozen=True)
class Shape:
    """Shape of a repository.

    Attributes:
        name: name of the claim, and prefix of the names of the runs.
        make: function that writes the repository into a folder.
        spec: fields of the manifest, merged one level deep.
        largest_mismatch: largest KL divergence between trainer and engine in the first step, in nats per token. Measured with one update
            per step: 1e-9 in float32, 1.5e-5 with an engine in bfloat16.
    """

    name: str
    make: Callable[[Path], None]
    spec: Mapping[str, Mapping[str, Any]]
    largest_mismatch: float = 1e-3


SHAPES = {
    # vLLM computes linear attention on a CPU only in bfloat16.
    "qwen3_5": Shape("hybrid", make_qwen3_5, {"model": {"dtype": "bfloat16"}}),
    "gpt_oss-mxfp4": Shape("four-bits", make_gpt_oss, {"model": {"dtype": "float32"}}),
    "qwen3_moe-replay": Shape("mixture", make_qwen3_moe, STEP_REPLAY, STEP_REPLAY_MISMATCH),
}


@dataclass(frozen=True)
class Result:
    """Result of a complete run.

    Attributes:
        before: mean held-out reward before the first step.
        after: mean held-out reward after the last step.
        mismatch: KL divergence between trainer and engine in the first step, in nats per token; both have equal weights before its first
            update.
        status: status of the run.
    """

    before: float
    after: float
    mismatch: float
    status: Mapping[str, Any]

    @property
    def gain(self) -> float:
        """Increase of the held-out reward."""
        return self.after - self.before


def put_repository(run: KubeRun, shape: Shape, folder: Path, image: str) -> None:
    """Create the claim of a shape, and copy its repository and the flipped advantage onto it as a user does."""
    repository = folder / shape.name
    shape.make(repository)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": shape.name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    run.kubectl("apply", "-f", "-", stdin=json.dumps(claim))
    files = (str(repository), str(FLIPPED), f"claim/{shape.name}")
    command = [sys.executable, "-m", "rlrun.cli.main", "put", *files, "-n", run.namespace, "--image", image]
    done = subprocess.run(command, env=run.cluster.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def manifest_of(shape: Shape, *, flipped: bool = False) -> dict[str, Any]:
    """Return a run of one trainer and one engine from the repository of a shape; the two runs differ in name and advantage."""
    document = example(
        "quickstart",
        maxSteps=STEPS,
        orchestrator={"batchSize": 128, "env": [{"name": "PYTHONPATH", "value": DATA}]},
        trainer={"processesPerReplica": 1, "optimizer": {"lr": 3e-4}, "scheduler": {"warmupSteps": 5}},
        evaluation={"interval": STEPS, "numTasks": TASKS},
        checkpoint={"interval": STEPS},
        algorithm={"filters": {"zeroVariance": False}},
        storage={"claimName": shape.name},
    )
    document["metadata"]["name"] = shape.name + ("-flipped" if flipped else "-learns")
    spec = document["spec"]
    spec["model"] = {"path": f"{DATA}/{shape.name}"}
    for block, fields in shape.spec.items():
        spec[block] |= fields
    if flipped:
        spec["algorithm"] |= {"advantage": {"name": f"{FLIPPED.stem}:advantages"}}
    return document


def run_to_end(run: KubeRun) -> Result:
    """Apply a run, wait until it is Complete, and return its result."""
    run.apply()
    status = run.wait_phase("Complete")
    found = outcome(run.cluster, run.name, run.namespace, 0.0).held_out
    assert [version for version, _ in found] == [0, STEPS], found
    [mismatch] = _FIRST_MISMATCH.findall(run.kubectl("logs", f"{run.name}-orchestrator-1", "-c", "orchestrator"))
    return Result(found[0][1], found[-1][1], float(mismatch), status)
