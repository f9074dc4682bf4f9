"""`rlrun render` and `fit` with the defaults of a team: applied values, locks and lookup of defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlrun.cli import validate
from rlrun.defaults.team_defaults import apply_defaults, read_defaults

SPEC = {
    "model": {"tiny": {}},
    "maxSteps": 4,
    "environments": [{"id": "reverse-text", "groupSize": 8}],
    "orchestrator": {"batchSize": 16},
}
CONTENT = {
    "spec": {"trainer": {"image": "team/trainer:1"}, "failurePolicy": {"maxRestarts": 9}},
    "locked": ["trainer.image"],
}
CONFIG_MAP = {
    "kind": "ConfigMap",
    "metadata": {"name": "team", "namespace": "rlrun-system"},
    "data": {"defaults.yaml": "spec: {placement: {pool: other}}", "defaults.team-a.yaml": yaml.safe_dump(CONTENT)},
}


def written(folder: Path, name: str, document: object) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(document))
    return str(path)


def manifest(folder: Path, namespace: str | None = "team-a", **spec: object) -> str:
    metadata = {"name": "a"} | ({"namespace": namespace} if namespace else {})
    document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata, "spec": {**SPEC, **spec}}
    return written(folder, "run.yaml", document)


@pytest.mark.parametrize(
    "given",
    [CONFIG_MAP, {"runDefaults": {"namespaces": {"team-a": CONTENT}}}, {"runDefaults": {"all": CONTENT}}, CONTENT],
    ids=["ConfigMap", "values by namespace", "values for all", "content"],
)
def test_applied_defaults_are_reported_with_source(
    given: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate.run_render(["--defaults", written(tmp_path, "d.yaml", given), manifest(tmp_path)]) == 0
    out = capsys.readouterr().err
    assert "note: spec.failurePolicy.maxRestarts is 9, from the defaults in ConfigMap " in out
    assert "note: spec.trainer.image is team/trainer:1, from the defaults in ConfigMap " in out
    assert out.count("; it is locked") == 1


def test_locked_field_is_refused_with_operator_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = written(tmp_path, "d.yaml", CONFIG_MAP)
    run = manifest(tmp_path, trainer={"image": "mine:2"})
    assert validate.run_render(["--defaults", given, run]) == 78
    text = str(CONFIG_MAP["data"]["defaults.team-a.yaml"])  # type: ignore[index]
    team = read_defaults(text, "rlrun-system/team", "defaults.team-a.yaml")
    (words,) = apply_defaults(yaml.safe_load(Path(run).read_text()), team).refusals
    assert words in capsys.readouterr().err
    for command, extra in ((validate.run_render, []), (validate.run_fit, ["--gpu-memory", "80Gi"])):
        assert command([run, "--defaults", given, *extra]) == 78
        assert words in capsys.readouterr().err


def test_option_overrides_default_but_not_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, run = written(tmp_path, "d.yaml", CONFIG_MAP), manifest(tmp_path)
    assert validate.run_render(["--defaults", given, run, "--failure-policy.max-restarts", "2"]) == 0
    assert "maxRestarts" not in capsys.readouterr().err
    assert validate.run_render(["--defaults", given, run, "--trainer.image", "mine:2"]) == 78
    assert "trainer.image (mine:2) is locked by ConfigMap rlrun-system/team; remove it" in capsys.readouterr().err


def test_defaults_are_selected_by_namespace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = written(tmp_path, "d.yaml", CONFIG_MAP)
    assert validate.run_render(["--defaults", given, manifest(tmp_path, None)]) == 0
    assert "spec.placement.pool is other" in capsys.readouterr().err
    assert validate.run_render(["--defaults", given, "--namespace", "team-a", manifest(tmp_path, None)]) == 0
    assert "spec.trainer.image is team/trainer:1" in capsys.readouterr().err
    only = written(tmp_path, "d.yaml", {"runDefaults": {"namespaces": {"team-b": CONTENT}}})
    assert validate.run_render(["--defaults", only, manifest(tmp_path)]) == 0
    assert "run.yaml: note: there are no defaults for its namespace" in capsys.readouterr().err


def test_render_prints_manifest_with_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locks = {"spec": {"tracking": {"mlflow": {"uri": "http://mlflow.tools.svc"}}}}
    assert validate.run_render(["--defaults", written(tmp_path, "d.yaml", locks), manifest(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tracking"]["mlflow"]["uri"] == "http://mlflow.tools.svc"
    assert "note: spec.tracking.mlflow.uri is http://mlflow.tools.svc, from the defaults in" in err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"kind": "ConfigMap", "data": {"x": "y"}},
            "contains no defaults for runs, expected a ConfigMap with the keys",
        ),
        (
            {"runDefaults": {"configMap": "team"}},
            "the defaults are in ConfigMap team; pass the output of kubectl get configmap",
        ),
        ({"spec": {"maxSteps": 3}}, "spec.maxSteps cannot have a default; remove it"),
    ],
)
def test_unusable_defaults_file_is_refused_with_fix(
    given: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate.run_render(["--defaults", written(tmp_path, "d.yaml", given), manifest(tmp_path)]) == 78
    assert words in capsys.readouterr().err
