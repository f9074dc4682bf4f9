"""Trainer over several machines without Kubernetes: plain torchrun on each, and one file written by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.paths import RunPaths
from tests.support.programs import finish
from tests.trainer.conftest import KEY

pytestmark = pytest.mark.full

STEPS = 2
FILE = """
output_dir = "{folder}"
max_steps = {steps}
seq_len = 32
replicas = 2
micro_batch_tokens = 64

[model]
path = "{model}"
dtype = "float32"

[optimizer]
lr = 1e-3
"""


def test_two_plain_torchrun_groups_form_one_trainer(
    make_run: Callable[[str], Any], model: Path, recorded: Path, tmp_path: Path
) -> None:
    paths, file = RunPaths(tmp_path / "by-hand"), tmp_path / "trainer.toml"
    file.write_text(FILE.format(folder=paths.root, steps=STEPS, model=model))
    port = free_port()

    def machine(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["-m", "rlrun.trainer", "--config", str(file), "--replay", str(recorded)]
        own = {"RLRUN_ATTEMPT": "1", "RLRUN_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=os.environ | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    machines = [machine(0), machine(1)]
    try:
        said = [finish(each)[0] for each in machines]
    finally:
        for each in machines:
            each.kill()
    assert [each.returncode for each in machines] == [0, 0], said
    found = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    expected = make_run("one-group").train(ranks=2, replay=recorded, max_steps=STEPS)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    attempt = read_attempt(paths.attempt_file(1))
    assert attempt.world_size == 2
    assert attempt.uid == json.loads(paths.identity.read_text())["uid"]
