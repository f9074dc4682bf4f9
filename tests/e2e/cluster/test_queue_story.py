"""The operator's queue on real kubelets: `tests/e2e/story`, which also writes its events down."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.cluster.api import Cluster
from tests.cluster.images import BuiltImage
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.story.play import NAMESPACE, Story, installed
from tests.e2e.story.told import Line, read

pytestmark = [pytest.mark.timeout(1200), pytest.mark.nodes_recover]


@pytest.fixture
def native(cluster: Cluster) -> NativeCluster:
    """The session's cluster, whose machines can be switched off."""
    assert isinstance(cluster, NativeCluster), "its machines are broken: python -m tests.cluster up --provider native"
    return cluster


def _told(lines: list[Line], who: str) -> list[str]:
    return [line.what for line in lines if line.who == who]


def test_three_runs_and_room_for_one_then_a_fourth_of_higher_priority_then_a_node_is_lost(
    native: NativeCluster, images: Mapping[str, BuiltImage], references: Mapping[str, str]
) -> None:
    with installed(native, references):
        Story(native, images["stub"].reference).play()
        lines = read(native, NAMESPACE)
    assert _told(lines, "third")[0] == "Queued"
    second = [what for what in _told(lines, "second") if what not in ("EnginesAvailable", "Training")]
    assert second[:5] == ["Queued", "Admitted", "AttemptStarted", "Preempted", "Suspending"], second
    assert second[-1] == "ResumedFromCheckpoint", second
    assert "EnginesUnavailable" not in second, "they went with the run"
    urgent = _told(lines, "urgent")
    order = ["Disrupted", "TrainerResized", "ResumedFromCheckpoint", "Completed"]
    assert [what for what in urgent if what in order] == order, urgent
    (why,) = {line.why for line in lines if (line.who, line.what) == ("urgent", "TrainerResized")}
    assert why.startswith("2 to 1 pod: "), why
    assert all(line.what != "NeverFits" for line in lines), "a node that is off may come back"
