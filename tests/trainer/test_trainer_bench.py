"""`--bench` on real ranks: every length is measured and the run's folder stays empty."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.config.models.language_models import CriticConfig, ReferenceConfig
from rlrun.config.models.learning import AdvantageConfig, AlgorithmConfig, RegularizerConfig
from rlrun.local.preflight import free_port
from rlrun.trainer.ranks.launch import BenchOptions
from tests.trainer.conftest import Group

PPO = AlgorithmConfig(
    preset="ppo",
    advantage=AdvantageConfig(name="gae"),
    reference=ReferenceConfig(),
    regularizers=RegularizerConfig(kl=0.1),
    critic=CriticConfig(),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("algorithm", "beside"),
    [
        pytest.param(AlgorithmConfig(), "", id="alone"),
        pytest.param(PPO, ", reference, critic", id="companions"),
    ],
)
def test_bench_measures_every_length_on_two_ranks(
    make_run: Callable[[str], Any], tmp_path: Path, algorithm: AlgorithmConfig, beside: str
) -> None:
    run, log, output = make_run("bench"), tmp_path / "log", tmp_path / "out.json"
    config = run.write_config(ranks=2, algorithm=algorithm)
    before = sorted(run.paths.root.iterdir())
    options = BenchOptions(seq_lens=(64, 16), rows=2, steps=2, warmup=1, output=str(output))
    began = time.monotonic()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RLRUN_ATTEMPT": "1"}
    pids = [
        run.zygote.start(
            shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            ["--config", str(config), *options.rank_arguments()],
            log,
        )
        for rank in range(2)
    ]
    run.groups.append(Group(pids, log, run.zygote))
    assert run.groups[-1].wait() == [0, 0], log.read_text()
    took = time.monotonic() - began
    written = json.loads(output.read_text())
    found = written["measurements"]
    assert [(one["seq_len"], one["tokens"], len(one["seconds"])) for one in found] == [(16, 64, 2), (64, 256, 2)]
    assert all(second > 0 for one in found for second in one["seconds"])
    assert sum(second for one in found for second in one["seconds"]) < took
    assert (
        f"M parameters, adamw{beside}, attention sdpa, activations none, torch {torch.__version__}\n" in log.read_text()
    )
    assert written["title"] in log.read_text()
    table = [line for line in log.read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:3] for line in table] == [
        ["| seq len", "tokens per step", "MFU %"],
        ["| 16", "64", "-"],
        ["| 64", "256", "-"],
    ]
    assert sorted(run.paths.root.iterdir()) == before
