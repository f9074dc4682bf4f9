"""Independence of losses and weights from the number of ranks and from packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlrun.config.models.parallel import ParallelismConfig

pytestmark = pytest.mark.full

STEPS = 6


def weights(run: Any, version: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(run.paths.version(version, 1).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def test_ranks_and_packing_do_not_change_training(make_run: Callable[[str], Any], recorded: Path) -> None:
    reference = make_run("reference")
    expected = reference.train(ranks=1, replay=recorded, micro_batch_tokens=1024)
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert expected[0]["grad_norm"] > 0
    assert expected[0]["param_checksum"] != expected[-1]["param_checksum"]
    context = ParallelismConfig(cp=2)
    for name, ranks, tokens, parallelism in (
        ("two", 2, 1024, ParallelismConfig()),
        ("unpacked", 1, 16, ParallelismConfig()),
        ("two_unpacked", 2, 16, ParallelismConfig()),
        ("context", 2, 1024, context),
    ):
        run = make_run(name)
        found = run.train(ranks=ranks, replay=recorded, micro_batch_tokens=tokens, parallelism=parallelism)
        for one, other in zip(expected, found, strict=True):
            for metric in ("loss", "grad_norm", "entropy", "mismatch_kl", "tokens", "loss_tokens"):
                assert other[metric] == pytest.approx(one[metric], rel=1e-5, abs=1e-5), (name, one["step"], metric)
        before, after = weights(reference, STEPS), weights(run, STEPS)
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            torch.testing.assert_close(after[key], tensor, atol=1e-5, rtol=1e-5)


def test_equal_batches_give_equal_bits(make_run: Callable[[str], Any], recorded: Path) -> None:
    sums = [
        [line["param_checksum"] for line in make_run(name).train(ranks=2, replay=recorded, max_steps=3)]
        for name in ("one", "two")
    ]
    assert sums[0] == sums[1]
