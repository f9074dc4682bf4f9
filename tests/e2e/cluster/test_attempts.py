"""Attempts of untrusted code in the pods of a run: the rows of docs/security.md on environments and on programs of a
model.

`RLRUN_WRITE_ATTEMPTS=1 pytest tests/e2e/cluster/test_attempts.py` rewrites the table of
`benchmarks/results/attempts.md`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.images import BuiltImage
from tests.e2e.cluster.attempts import TABLE, check_outcomes, find_places, make_attempts, write_table
from tests.e2e.cluster.kube_run import KubeRun

pytestmark = pytest.mark.timeout(1200)


def test_untrusted_code_cannot_leave_its_sandbox(
    new_run: Callable[[dict[str, Any]], KubeRun],
    stub_manifest: Callable[..., dict[str, Any]],
    cluster: Cluster,
    images: Mapping[str, BuiltImage],
) -> None:
    other = new_run(stub_manifest("aimed-at", steps=1000))
    other.apply()
    other.wait_step(1)
    run = new_run(stub_manifest("attempted", steps=1000))
    found = make_attempts(run, find_places(run, other, cluster), images["stub"].reference)
    if os.environ.get("RLRUN_WRITE_ATTEMPTS"):
        write_table(found, TABLE)
    check_outcomes(found)
