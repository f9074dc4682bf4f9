"""A server that is no MLflow is told from one, whatever JSON it answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlrun.config.models.tracking import MlflowConfig
from rlrun.tracking.backends.mlflow_rest import MlflowTracker
from rlrun.tracking.record import TrackedRun, TrackerError

RUN = TrackedRun(uid="u", name="n", root=Path("/run"), config={}, max_steps=1)


@pytest.mark.parametrize(
    "answer",
    [{}, {"experiment": "1"}, {"experiment": {}, "runs": ["x"]}, {"experiment": {}, "run": {"info": 3}}],
    ids=str,
)
def test_an_answer_of_another_form_names_the_field(answer: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MlflowTracker(MlflowConfig.model_validate({"uri": "http://tracker.example.org"}), {})
    monkeypatch.setattr(tracker, "_call", lambda *_: answer)
    with pytest.raises(
        TrackerError, match=re.escape("does not answer like an MLflow server; set tracking.mlflow.uri to one")
    ):
        tracker.open(RUN, [], 0)
