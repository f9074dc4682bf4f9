"""What the tests of the commands share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlrun.cli.files import put
from rlrun.cli.runs import change, common, compare, debug, logs, look, plot, pull, rollouts
from rlrun.inspect.kubectl import Kubectl
from tests.unit.inspect.recorded import Recorded, Use


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Put recorded answers in the place of a cluster."""

    def record(cluster: Recorded) -> Recorded:
        def api(options: object) -> Kubectl:
            flags: Sequence[str] = common.flags(options)  # type: ignore[arg-type]
            return cluster.kubectl(flags)

        for module in (change, compare, debug, logs, look, plot, pull, put, rollouts):
            monkeypatch.setattr(module, "api", api)
        return cluster

    return record
