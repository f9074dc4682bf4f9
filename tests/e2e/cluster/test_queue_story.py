"""The operator's queue on real kubelets, played by `tests/e2e/story`."""

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


def _list_reasons(lines: list[Line], who: str, *reasons: str) -> list[str]:
    """Return which of these reasons occurred on a run, in the order of their first events, which are more than a second
    apart."""
    return list(dict.fromkeys(line.what for line in lines if line.who == who and line.what in reasons))


def test_queue_orders_preempts_and_survives_node_loss(
    native: NativeCluster, images: Mapping[str, BuiltImage], references: Mapping[str, str]
) -> None:
    with installed(native, references):
        Story(native, images["stub"].reference).play()
        lines = read(native, NAMESPACE)
    assert _list_reasons(lines, "third", "Queued", "Admitted", "AttemptStarted") == ["Queued"]
    order = ["Queued", "Admitted", "Preempted", "ResumedFromCheckpoint"]
    assert _list_reasons(lines, "second", *order) == order
    assert not _list_reasons(lines, "second", "EnginesUnavailable", "InferenceScaled"), "they went with the run"
    order = ["Disrupted", "TrainerResized", "ResumedFromCheckpoint", "Completed"]
    assert _list_reasons(lines, "urgent", *order) == order
    (why,) = {line.why for line in lines if (line.who, line.what) == ("urgent", "TrainerResized")}
    assert why.startswith("2 to 1 pod: "), why
    assert all(line.what != "NeverFits" for line in lines), "a node that is off may come back"
