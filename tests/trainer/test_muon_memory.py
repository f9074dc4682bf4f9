"""Muon on four ranks with fewer experts than ranks, and with more: each matrix computed once, bounded traffic and memory."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rlrun.local.preflight import free_port
from tests.support.programs import run_program
from tests.trainer.muon_memory import CASES

pytestmark = pytest.mark.full

RANKS = 4
COPIES = 8
"""Limit of copies of a rank's matrices in the exchange and the iteration, in addition to the directions of all matrices."""
UNEVEN = 1.5
"""Limit of a rank's work, in shares, if an exchange has fewer matrices of a shape than ranks."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("muon") / "found.json"
    done = run_program([sys.executable, "-m", "tests.trainer.muon_memory", str(file), str(RANKS), str(free_port())])
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(file.read_text()))


@pytest.mark.parametrize("case", CASES)
def test_muon_ranks_update_like_one_rank_and_resume_exactly(found: dict[str, Any], case: str) -> None:
    for rank in found[case]:
        assert rank["difference"] <= 1e-6
        assert rank["resumed"]


@pytest.mark.parametrize("case", CASES)
def test_muon_orthogonalizes_each_matrix_on_one_rank(found: dict[str, Any], case: str) -> None:
    ranks = found[case]
    assert sum(rank["orthogonalized"] for rank in ranks) == ranks[0]["matrices"]
    if case == "bounded":
        assert max(rank["orthogonalized"] for rank in ranks) <= UNEVEN * ranks[0]["matrices"] / RANKS
    else:  # all matrices at once, so that every rank has the same number
        assert {rank["orthogonalized"] for rank in ranks} == {ranks[0]["matrices"] / RANKS}


@pytest.mark.parametrize("case", CASES)
def test_muon_traffic_is_twice_the_divided_share(found: dict[str, Any], case: str) -> None:
    """Experts that are complete on a rank are not sent."""
    for rank in found[case]:
        assert set(rank["calls"]) == {"alltoall_base"}
    assert sum(rank["sent"]["alltoall_base"] for rank in found[case]) == 2 * sum(
        rank["exchanged"] for rank in found[case]
    )
    assert all((rank["exchanged"] < rank["shard"]) == (case == "many") for rank in found[case])


@pytest.mark.parametrize("case", CASES)
def test_muon_memory_is_bounded_by_the_share_of_a_rank(found: dict[str, Any], case: str) -> None:
    for rank in found[case]:
        limit = CASES[case][1] or rank["shard"]
        assert max(rank["batches"]) <= limit
        assert rank["peak"] <= rank["shard"] + COPIES * limit
