"""A sample of the matrix of `tests/e2e/chaos`; `make test-full` plays all cells."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.api import Cluster
from tests.cluster.images import BuiltImage
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.chaos.cells import CELLS, Cell
from tests.e2e.chaos.play import Outcome, play
from tests.e2e.cluster.conftest import NAMESPACE

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


def _cell(name: str) -> Cell:
    return next(cell for cell in CELLS if cell.name == name)


def _play(cluster: Cluster, images: Mapping[str, BuiltImage], *names: str) -> list[Outcome]:
    """Play cells at the same time, because each of them mostly waits."""
    assert isinstance(cluster, NativeCluster), "its machines are broken: python -m tests.cluster up --provider native"
    image = images["stub"].reference
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: play(cluster, NAMESPACE, _cell(name), image), names))


def test_runs_recover_from_crash_sigterm_and_operator_kills(cluster: Cluster, images: Mapping[str, BuiltImage]) -> None:
    died, asked, unwatched = _play(
        cluster,
        images,
        "at-checkpoint-manifest-before-rename",
        "trainer-1-sigterm",
        "operator-sigkill-up-to-3-times-while-i",
    )
    assert died.lost > 0
    assert asked.lost == 0
    assert unwatched.happened.startswith("attempt 2")


def test_run_continues_during_etcd_outage(cluster: Cluster, images: Mapping[str, BuiltImage]) -> None:
    (outcome,) = _play(cluster, images, "etcd-away-for-5-s")
    assert outcome.happened == "went on"
