"""Fixtures of the command tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlrun.cli import change_runs, copies, data_files, logs, plots, run_options, show_runs
from rlrun.inspect.kubectl import Kubectl
from tests.unit.inspect.recorded import Recorded, Use


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Replace the cluster by recorded responses."""

    def record(cluster: Recorded) -> Recorded:
        def api(options: object) -> Kubectl:
            flags: Sequence[str] = run_options.cluster_flags(options)  # type: ignore[arg-type]
            return cluster.kubectl(flags)

        for module in (change_runs, plots, copies, logs, show_runs, plots, copies, data_files, copies):
            monkeypatch.setattr(module, "cluster_client", api)
        return cluster

    return record
