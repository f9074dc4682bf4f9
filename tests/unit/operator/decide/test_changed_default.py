"""Upgrade from the release in which `none` was the default of `trainer.activationCheckpointing`."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import SPEC_HASH_ANNOTATION
from tests.unit.operator.decide.kube import Kube

UNSET, AUTO = "33615688a695a31d", "ad576c49181a16a9"
"""`spec_hash` of `SMALLEST` in that release: with an unset field or `none`, and with `auto`."""


def run_of_before(value: str | None, mark: str, started_with: str) -> Kube:
    """Return a running run whose objects were rendered by the earlier release, with the hash that it wrote.

    Args:
        value: written value of the field; None: unset.
        mark: hash of the earlier release.
        started_with: value in the configuration of the running attempt.
    """
    kube = Kube({"trainer": {"activationCheckpointing": started_with}}).start()
    rendered = kube.status["specHash"]
    trainer: dict[str, Any] = {} if value is None else {"activationCheckpointing": value}
    kube.run["spec"] = {**kube.run["spec"], "trainer": trainer}
    kube.run["status"] = {**kube.status, "specHash": mark}
    for ref, child in kube.objects.items():
        annotations = child["metadata"].get("annotations") or {}
        if annotations.get(SPEC_HASH_ANNOTATION) == rendered:
            marked = {**annotations, SPEC_HASH_ANNOTATION: mark}
            kube.objects[ref] = {**child, "metadata": {**child["metadata"], "annotations": marked}}
    return kube


@pytest.mark.parametrize(
    ("value", "mark", "started_with"),
    [(None, UNSET, "none"), ("none", UNSET, "none"), ("auto", AUTO, "auto")],
    ids=["unset", "none", "auto"],
)
def test_changed_default_does_not_restart_a_running_run(value: str | None, mark: str, started_with: str) -> None:
    kube = run_of_before(value, mark, started_with)
    before = len(kube.writes)
    kube.tick()
    assert kube.condition("ConfigurationValid")["reason"] == "Valid"
    assert kube.status["attempt"] == 1
    assert [write for write in kube.writes[before:] if "status" not in write] == []


def test_edit_of_a_running_run_of_before_is_seen() -> None:
    kube = run_of_before(None, UNSET, "none")
    kube.run["spec"] = {**kube.run["spec"], "trainer": {"activationCheckpointing": "full"}}
    kube.tick()
    assert kube.condition("ConfigurationValid")["reason"] != "Valid"
