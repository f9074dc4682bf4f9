"""Gradients of a rank between micro-batches: those of its shard, or the whole gradient if configured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from tests.support.programs import run_program

pytestmark = pytest.mark.full

PADDING = 1.1
"""Limit factor of a shard's gradient, which is stored in memory for equal shards."""


def measured(folder: Path, ranks: int) -> dict[str, Any]:
    file = folder / "found.json"
    done = run_program([sys.executable, "-m", "tests.trainer.gradient_memory", str(file), str(ranks), str(free_port())])
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def found_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("case", ["policy", "policy-bfloat16", "critic", "replicas"])
def test_rank_holds_only_the_gradient_of_its_shard(found: dict[str, Any], case: str) -> None:
    for rank in found[case]:
        before, *between = rank["gradients"]
        assert before == 0
        assert len(between) >= 2, "one micro-batch leaves nothing to sum"
        assert rank["shard"] <= (1.0 if case == "replicas" else 0.55) * rank["whole"]
        for held in between:
            assert rank["shard"] <= held <= PADDING * rank["shard"]


@pytest.mark.parametrize("case", ["policy-local", "critic-local"])
def test_local_gradient_sums_hold_the_whole_gradient(found: dict[str, Any], case: str) -> None:
    for rank in found[case]:
        assert all(held >= rank["whole"] for held in rank["gradients"][1:])


@pytest.mark.parametrize("case", ["policy", "critic"])
def test_gradient_accumulation_mode_changes_no_metric(found: dict[str, Any], case: str) -> None:
    for reduced, local in zip(found[case], found[f"{case}-local"], strict=True):
        for metric in ("loss", "grad_norm") if case == "policy" else ("value_loss", "critic_grad_norm"):
            assert reduced[metric] == pytest.approx(local[metric], rel=1e-5), metric
            assert reduced[metric] != 0


def test_replicas_reduce_their_gradients_once(found: dict[str, Any]) -> None:
    for rank in found["replicas"]:
        assert not any(rank["final"]), "all-reduced before the last micro-batch"
    assert all(all(rank["final"][1:]) for rank in found["policy"])


def test_held_gradient_bytes_decrease_with_ranks(found: dict[str, Any], found_of_four: dict[str, Any]) -> None:
    for ranks, cases, case in ((2, found, "policy"), (4, found_of_four, "policy"), (2, found_of_four, "hybrid")):
        for rank in cases[case]:
            held = max(rank["gradients"])
            assert rank["whole"] / ranks <= held <= PADDING * rank["whole"] / ranks, (case, ranks)


def test_hybrid_ranks_scatter_per_micro_batch_and_reduce_once(found_of_four: dict[str, Any]) -> None:
    """The remaining sent bytes are sums of metrics, losses and norms."""
    numbers = 2048
    for rank in found_of_four["hybrid"]:
        micro_batches = len(rank["gradients"])
        assert micro_batches >= 3
        assert rank["calls"]["reduce_scatter_base"] == micro_batches * rank["units"]
        assert (
            micro_batches * rank["whole"]
            <= rank["sent"]["reduce_scatter_base"]
            <= PADDING * micro_batches * rank["whole"]
        )
        assert rank["shard"] <= rank["sent"]["allreduce"] <= PADDING * rank["shard"] + numbers
    for rank in found_of_four["policy"]:
        assert rank["sent"]["allreduce"] <= numbers
