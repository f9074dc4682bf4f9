"""The operator's queue on real kubelets: `tests/e2e/story`, which also writes its events down."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.cluster.api import Cluster
from tests.cluster.images import BuiltImage
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.story.play import NAMESPACE, Story, installed
from tests.e2e.story.told import Line, read

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200), pytest.mark.nodes_recover]


@pytest.fixture
def native(cluster: Cluster) -> NativeCluster:
    """The session's cluster, whose machines can be switched off."""
    assert isinstance(cluster, NativeCluster), "its machines are broken: python -m tests.cluster up --provider native"
    return cluster


def _told(lines: list[Line], who: str, *reasons: str) -> list[str]:
    """Reasons that were told of a run, of these, in the order in which they first were; all are more than a second apart."""
    return list(dict.fromkeys(line.what for line in lines if line.who == who and line.what in reasons))


def test_three_runs_and_room_for_one_then_a_fourth_of_higher_priority_then_a_node_is_lost(
    native: NativeCluster, images: Mapping[str, BuiltImage], references: Mapping[str, str]
) -> None:
    with installed(native, references):
        Story(native, images["stub"].reference).play()
        lines = read(native, NAMESPACE)
    assert _told(lines, "third", "Queued", "Admitted", "AttemptStarted") == ["Queued"]
    order = ["Queued", "Admitted", "Preempted", "ResumedFromCheckpoint"]
    assert _told(lines, "second", *order) == order
    assert not _told(lines, "second", "EnginesUnavailable", "InferenceScaled"), "they went with the run"
    order = ["Disrupted", "TrainerResized", "ResumedFromCheckpoint", "Completed"]
    assert _told(lines, "urgent", *order) == order
    (why,) = {line.why for line in lines if (line.who, line.what) == ("urgent", "TrainerResized")}
    assert why.startswith("2 to 1 pod: "), why
    assert all(line.what != "NeverFits" for line in lines), "a node that is off may come back"
