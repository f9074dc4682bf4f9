"""Cached judgments of specifications: kept while the run exists, and never used for another run."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.defaults.team_defaults import Reading
from rlrun_operator import validate_spec as judging
from rlrun_operator.state import Manifest
from rlrun_operator.validate_spec import forget_run, judge_spec

RUNS = 1000


def run(number: int, **spec: Any) -> Manifest:
    metadata = {"namespace": "team", "name": f"run-{number}", "uid": f"uid-{number}", "generation": 1}
    return {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata, "spec": {"maxSteps": 0, **spec}}


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parsed runs, in order."""
    found: list[str] = []
    read = judging.read_spec

    def counted(document: Manifest) -> Reading:
        found.append(document["metadata"]["name"])
        return read(document)

    monkeypatch.setattr(judging, "read_spec", counted)
    monkeypatch.setattr(judging, "_remembered", {})
    return found


def test_each_run_is_parsed_once(readings: list[str]) -> None:
    for _ in range(3):
        for number in range(RUNS):
            judge_spec(run(number))
    assert len(readings) == RUNS


def test_edited_run_and_successor_are_parsed_again(readings: list[str]) -> None:
    first = judge_spec(run(1))
    edited = judge_spec(run(1, maxSteps=-1))
    assert edited.problems != first.problems
    successor = run(1)
    successor["metadata"]["uid"] = "another"
    judge_spec(successor)
    assert readings == ["run-1"] * 3


def test_judgment_of_deleted_run_is_forgotten(readings: list[str]) -> None:
    judge_spec(run(1))
    forget_run("team", "run-1")
    assert judging._remembered == {}
    judge_spec(run(1))
    assert len(readings) == 2
