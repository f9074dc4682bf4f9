"""Router replay on two ranks, by data, context and experts, with and without recomputation: the reference's log-probabilities."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rlrun.local.preflight import free_port
from rlrun.protocol.files.batch import write_batch
from tests.support import routed_models
from tests.support.programs import run_program
from tests.support.sets import few_in_gate
from tests.trainer.routed import MODES

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
