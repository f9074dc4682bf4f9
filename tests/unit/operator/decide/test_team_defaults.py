"""Defaults of a namespace: precedence, locked fields, errors, and values kept by a running attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.resource import RLRun
from rlrun.defaults.team_defaults import apply_defaults, read_defaults
from rlrun_operator.names import Ref
from rlrun_operator.runtime.defaults_files import DefaultsFiles
from rlrun_operator.state import TeamDefaults
from tests.unit.operator.decide.kube import Kube

ROOT = Path(__file__).parents[4]
MAP, KEY = "system/team", "defaults.yaml"
WHOLE: dict[str, Any] = {
    **{
        role: {
            "image": f"registry.example.com/{role}:1",
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "rl"},
            "tolerations": [{"key": "rl", "operator": "Exists"}],
            "priorityClassName": "team",
        }
        for role in ("trainer", "inference", "orchestrator")
    },
    "placement": {"pool": "h100", "topology": {"preferred": "rack"}, "spreadInference": "None"},
    "failurePolicy": {"maxRestarts": 10, "backoff": {"initialSeconds": 5}},
    "ttlSecondsAfterFinished": 3600,
    "storage": {"claimTemplate": {"storageClassName": "fast"}},
    "tracking": {"mlflow": {"uri": "http://mlflow.tools.svc"}},
}


def make_defaults(spec: dict[str, Any], *locked: str) -> TeamDefaults:
    found = read_defaults(yaml.safe_dump({"spec": spec, "locked": list(locked)}), MAP, KEY)
    assert found.problems == ""
    return found


def make_run_with_defaults(spec: dict[str, Any], run: dict[str, Any] | None = None, *locked: str) -> Kube:
    """Run in a namespace with these defaults."""
    kube = Kube(run)
    kube.defaults = make_defaults(spec, *locked)
    return kube


def pod_spec(kube: Kube, kind: str = "StatefulSet", name: str = "run-trainer") -> Any:
    return kube.objects[Ref(kind, name)]["spec"]["template"]["spec"]


def test_run_takes_missing_fields_from_defaults_and_lists_them() -> None:
    kube = make_run_with_defaults(WHOLE, {"trainer": {"image": "mine:2", "nodeSelector": {"own": "yes"}}})
    written = dict(kube.run["spec"])
    kube.settle()
    pod = pod_spec(kube)
    assert (pod["containers"][0]["image"], pod["priorityClassName"]) == ("mine:2", "team")
    assert pod["nodeSelector"]["own"] == "yes"
    assert "pool" not in pod["nodeSelector"], "a run's own selector is all of it"
    assert kube.objects[Ref("PersistentVolumeClaim", "run-data")]["spec"]["storageClassName"] == "fast"
    told = kube.status["defaults"]
    assert (told["configMap"], len(told["mark"])) == (MAP, 8)
    assert {"trainer.priorityClassName", "inference.image", "storage.claimTemplate.storageClassName"} <= set(
        told["fields"]
    )
    assert not {"trainer.image", "trainer.nodeSelector"} & set(told["fields"])
    assert kube.run["spec"] == written, "what is stored is what was written"


def test_running_attempt_keeps_its_defaults() -> None:
    kube = make_run_with_defaults({"trainer": {"image": "team:1"}})
    kube.settle()
    kube.tick()
    mark, applies = kube.status["defaults"]["mark"], list(kube.applied)
    kube.defaults = make_defaults({"trainer": {"image": "team:2"}})
    kube.settle()
    assert (kube.applied, kube.status["attempt"], kube.status["defaults"]["mark"]) == (applies, 1, mark)
    valid = kube.condition("ConfigurationValid")
    assert (valid["status"], valid["reason"]) == ("True", "ChangePending")
    assert valid["message"].startswith("the defaults of the namespace were edited")
    del kube.objects[Ref("Pod", "run-trainer-0")]
    for _ in range(20):
        kube.tick(10.0)
        kube.settle()
    assert kube.status["attempt"] == 2
    assert pod_spec(kube)["containers"][0]["image"] == "team:2"
    assert kube.status["defaults"]["mark"] != mark


def test_locked_field_cannot_be_changed() -> None:
    spec = {"trainer": {"image": "team:1", "nodeSelector": {"pool": "rl"}}}
    kube = make_run_with_defaults(
        spec, {"trainer": {"image": "mine:2", "nodeSelector": {"own": "yes"}}}, "trainer.image"
    )
    kube.settle()
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "ForbiddenByPolicy")
    assert kube.status["message"].startswith(
        "trainer.image (mine:2) is locked by ConfigMap system/team; remove it, or write team:1"
    )
    assert ("Warning", "ForbiddenByPolicy") in kube.told
    assert list(kube.objects) == []
    kube.edit(trainer={"image": "team:1", "nodeSelector": {"own": "yes"}})
    kube.settle()
    assert kube.status["attempt"] == 1
    assert "own" in pod_spec(kube)["nodeSelector"], "it has no lock"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spec: [", "not YAML"),
        ("spec: {}\nlock: [a]", "lock"),
        ("spec: 5", "spec (5)"),
        ("spec: {maxSteps: 5}", "spec.maxSteps cannot have a default; remove it"),
        ("spec: {placement: {colocate: true}}", "spec.placement.colocate cannot have a default"),
        ("spec: {trainer: {image: 'a b'}}", "trainer.image"),
        ("spec: {failurePolicy: {maxRestart: 3}}", "maxRestart"),
        ("locked: [trainer.image]", "locked (trainer.image) has no value in spec"),
    ],
)
def test_invalid_defaults_are_reported_and_do_not_affect_attempts(text: str, words: str) -> None:
    wrong = read_defaults(text, MAP, KEY)
    assert wrong.problems.startswith(f"ConfigMap {MAP}, key {KEY}: ")
    assert words in wrong.problems
    fresh, kube = Kube(), Kube()
    fresh.defaults = wrong
    fresh.settle()
    assert (fresh.status["reason"], words in fresh.status["message"]) == ("ForbiddenByPolicy", True)
    assert fresh.told == [("Warning", "ForbiddenByPolicy")]
    kube.settle()
    kube.tick()
    applies = list(kube.applied)
    kube.defaults = wrong
    kube.settle()
    assert (kube.applied, kube.status["attempt"], kube.status["phase"]) == (applies, 1, "Starting")
    assert kube.condition("ConfigurationValid")["message"].endswith("attempt 1 continues, and no other attempt starts")
    fresh.defaults = make_defaults({})
    fresh.settle()
    assert fresh.status["attempt"] == 1, "it begins by itself once that is put right"


def test_conflicting_defaults_are_reported_with_the_fix() -> None:
    kube = make_run_with_defaults(
        {"failurePolicy": {"backoff": {"maxSeconds": 10}}}, {"failurePolicy": {"backoff": {"initialSeconds": 60}}}
    )
    kube.settle()
    message = kube.status["message"]
    assert message.startswith("with the defaults of ConfigMap system/team (failurePolicy.backoff.maxSeconds): ")
    assert message.endswith("give the run values of its own there, or change the defaults")
    kube.edit(failurePolicy={"backoff": {"initialSeconds": 60, "maxSeconds": 60}})
    kube.settle()
    assert kube.status["attempt"] == 1


def test_run_with_refused_defaults_starts_with_corrected_ones() -> None:
    kube = make_run_with_defaults({"trainer": {"image": "team:1"}})
    kube.rejection = "trainer.image: refused"
    kube.settle()
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "InvalidConfiguration")
    kube.rejection, kube.defaults = None, make_defaults({"trainer": {"image": "team:2"}})
    kube.settle()
    assert kube.status["attempt"] == 1


EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_accept_defaults_for_all_fields(path: Path) -> None:
    team = make_defaults(WHOLE)
    for document in yaml.safe_load_all(path.read_text()):
        if document.get("kind") == "RLRun":
            found = apply_defaults(document, team)
            assert found.taken
            RLRun.model_validate(found.run)


def test_namespace_defaults_file_replaces_the_global_one(tmp_path: Path) -> None:
    files = DefaultsFiles(tmp_path / "mount", MAP)
    assert not files.reload_files()
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "defaults.yaml").write_text("spec: {trainer: {image: all:1}}")
    (tmp_path / "mount" / "defaults.team-a.yaml").write_text("spec: {trainer: {image: a:1}}")
    (tmp_path / "mount" / "..data").write_text("kubelet")
    assert files.reload_files()
    assert not files.reload_files()
    assert {name: found.values for name, found in files.current.items()} == {
        "": {"trainer.image": "all:1"},
        "team-a": {"trainer.image": "a:1"},
    }
    (tmp_path / "mount" / "defaults.yaml").unlink()
    assert files.reload_files()
    assert set(files.current) == {"team-a"}
