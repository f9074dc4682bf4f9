"""Manifests in Python: unchanged storage, and errors with field, value and fix."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import rlrun
from rlrun import ManifestError, Run, RunError
from rlrun.api.run_fields import RunFields
from rlrun.api.run_manifest import parse_manifest
from rlrun.runs import blocks
from rlrun.runs.blocks import Environment, Inference, LoRA, Model, SpecFields, TinyModel, Trainer

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def tiny() -> Run:
    return Run(
        "tiny",
        model=Model(tiny=TinyModel(layers=1)),
        environments=[Environment(id="reverse-text", group_size=4, args={"minLength": 2, "max_length": 3})],
        orchestrator={"batch_size": 16},
        trainer=Trainer(lora=LoRA(rank=4)),
        labels={"team": "a"},
    )


WRITTEN = {
    "apiVersion": "rlrun.io/v1alpha1",
    "kind": "RLRun",
    "metadata": {"name": "tiny", "labels": {"team": "a"}},
    "spec": {
        "model": {"tiny": {"layers": 1}},
        "environments": [{"id": "reverse-text", "groupSize": 4, "args": {"minLength": 2, "max_length": 3}}],
        "orchestrator": {"batchSize": 16},
        "trainer": {"lora": {"rank": 4}},
    },
}


def test_manifest_contains_only_written_fields() -> None:
    assert yaml.safe_load(tiny().to_yaml()) == WRITTEN
    assert yaml.safe_load(Run.load(WRITTEN).to_yaml()) == WRITTEN


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_unchanged_manifest_keeps_its_text(path: Path) -> None:
    assert Run.load(path).to_yaml() == path.read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_changed_manifest_is_read_as_the_same_run(path: Path) -> None:
    before, _ = parse_manifest(path.read_text(), "before")
    after, _ = parse_manifest(Run.load(path).set(seed=77).set(f"seed={before.spec.seed}").to_yaml(), "after")
    assert after.spec == before.spec
    assert after.metadata == before.metadata


def test_words_and_fields_change_a_manifest() -> None:
    run = tiny().set("trainer.replicas=2", "environments.0.groupSize=8", max_steps=7, inference={"replicas": 3})
    spec = yaml.safe_load(run.to_yaml())["spec"]
    assert spec["trainer"] == {"lora": {"rank": 4}, "replicas": 2}, "the block keeps what is not named"
    assert (spec["environments"][0]["groupSize"], spec["maxSteps"], spec["inference"]) == (8, 7, {"replicas": 3})


def test_null_and_none_remove_a_field() -> None:
    run = tiny().set("trainer.lora=null", "spec.seed=5", max_steps=9).set(max_steps=None)
    spec = yaml.safe_load(run.to_yaml())["spec"]
    assert (spec["trainer"], spec["seed"], "maxSteps" in spec) == ({}, 5, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Run("Tiny", model={"tiny": {}}), "Run: name: 'Tiny' is not an RFC 1035 label"),
        (lambda: Run("a", environments=[{"id": "reverse-text"}]), "Run: model: required, but not set"),
        (lambda: Trainer(replicas=0), "Trainer: replicas: got 0, expected a whole number from 1 to 4096"),
        (lambda: Trainer(lr=1), "Trainer: lr: unknown field"),  # type: ignore[call-arg]
        (lambda: tiny().set("trainer.replica=2"), "trainer.replica: unknown option (did you mean"),
        (lambda: tiny().set("trainer.replicas=x"), 'Run.set: trainer.replicas: got "x" (a string), expected a whole'),
        (lambda: tiny().set(trainer={"replicas": 0}), "Run.set: trainer.replicas: got 0, expected"),
        (lambda: tiny().set("replicas"), "got 'replicas'; expected field=value"),
        (lambda: tiny().set("trainer.replica=null"), "unknown field trainer.replica"),
        (lambda: tiny().set(orchestrator={"batch_size": 7}), "set batchSize to 4 or 8"),
        (lambda: Run.load("nothere.yaml"), "nothere.yaml: no such file"),
        (lambda: Run.load({"kind": "RLRun"}), "apiVersion: required, but not set"),
        (lambda: tiny().status(), "tiny was not started; start it with .local() or .apply()"),
        (lambda: tiny().compare(), "compare needs at least one other run"),
    ],
)
def test_each_problem_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RunError) as caught:
        call()
    assert message in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "pydantic's traceback is shown, too"
    assert caught.value._render_traceback_() == [f"{type(caught.value).__name__}: {caught.value}"]


def test_problems_are_reported_together() -> None:
    with pytest.raises(ManifestError) as caught:
        Run("a", model={"tiny": {}}, environments=[{"id": "reverse-text"}], trainer={"replicas": 0}, max_steps=0)
    assert {problem.path for problem in caught.value.problems} == {"trainer.replicas", "max_steps"}


def test_invalid_change_leaves_run_unchanged() -> None:
    run = tiny()
    before = run.to_yaml()
    with pytest.raises(ManifestError):
        run.set(max_steps=0)
    assert run.to_yaml() == before


def test_typed_fields_equal_resource_fields() -> None:
    assert list(typing.get_type_hints(SpecFields)) == list(RunFields.model_fields)


def test_block_types_equal_resource_models() -> None:
    found = [one for one in vars(blocks).values() if type(one) is type(Trainer)]
    assert len(found) > 15
    assert isinstance(Inference(replicas=2), blocks.InferenceBlock)
    assert all(one.__mro__[1].model_fields.keys() == one.model_fields.keys() for one in found)


def test_unstarted_run_shows_its_manifest() -> None:
    run = tiny().set(seed=3)
    assert repr(run) == "<Run tiny: not started>"
    assert "seed: 3" in run._repr_html_()
    assert "<script" not in Run("a", model={"path": "<script>"}, environments=[{"id": "reverse-text"}])._repr_html_()


def test_save_writes_the_manifest(tmp_path: Path) -> None:
    assert Run.load(tiny().save(tmp_path / "run.yaml")).to_yaml() == tiny().to_yaml()


def test_unknown_api_name_is_not_an_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Runs'"):
        _ = rlrun.Runs  # type: ignore[attr-defined]
