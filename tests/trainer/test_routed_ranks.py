"""Mixtures on two ranks, by data, context and experts: the reference's log-probabilities with replay, and its auxiliary loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlrun.local.preflight import free_port
from rlrun.protocol.files.batch import Batch, write_batch
from tests.support import routed_models
from tests.support.balanced_models import RouterReader, balance_loss
from tests.support.programs import run_program
from tests.support.sets import few_in_gate
from tests.trainer.routed import COEFFICIENT, MODES

RANKS = 2
REPLAYED, NATIVE = 1e-5, 1e-2


@pytest.mark.parametrize("field", few_in_gate(("cp", "ep", "dp_shard"), ("cp",)))
def test_two_ranks_replay_the_routes_of_an_engine(field: str, tmp_path: Path) -> None:
    source = routed_models.save_model(tmp_path / "source")
    batch = routed_models.make_batch(source)
    write_batch(tmp_path / "batch", batch)
    want = np.concatenate([one.numpy() for one in routed_models.expected_logprobs(source, batch)])
    file = tmp_path / "found.json"
    arguments = [str(file), str(RANKS), str(free_port()), str(source), str(tmp_path / "batch"), field]
    done = run_program([sys.executable, "-m", "tests.trainer.routed", *arguments])
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(file.read_text())
    tokens = sum(routed_models.LENGTHS)
    for mode in MODES:
        errors = {
            name: float(np.abs(np.concatenate(found[mode][name]) - want).max()) for name in ("native", "replayed")
        }
        assert errors["native"] > NATIVE, (mode, errors)
        assert errors["replayed"] <= REPLAYED, (mode, errors)
        share = found[mode]["metrics"]["routing/replayed_share"]
        assert share == pytest.approx((tokens - len(routed_models.LENGTHS)) / tokens), mode
        assert found[mode]["metrics"]["routing/changed_share"] > 0, mode
    check_balance(found["balance"], source, batch)


def check_balance(found: dict[str, Any], source: Path, batch: Batch) -> None:
    """Check the auxiliary loss, whose sequences are divided over the ranks or within a row with padding."""
    reader = RouterReader(source)
    want = balance_loss(reader, batch)
    (COEFFICIENT * want).backward()
    assert found["loss"] == pytest.approx(float(want.detach()), rel=1e-5)
    gradients = {name: one.grad for name, one in reader.model.named_parameters() if name.endswith(".gate.weight")}
    assert gradients.keys() == found["gradients"].keys()
    for name, gradient in gradients.items():
        error = float((torch.tensor(found["gradients"][name]) - gradient).norm() / gradient.norm())
        assert error < 1e-4, (name, error)
