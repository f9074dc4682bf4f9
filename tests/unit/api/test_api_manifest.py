"""Manifest parser: one RLRun in camelCase, with the line of every problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.api.run_manifest import parse_manifest, read_manifest
from rlrun.config.loading.problems import ConfigError

MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata:
  name: quick
  namespace: team-a
  creationTimestamp: null
  managedFields: []
spec:
  model:
    tiny: {}
  seqLen: 512
  environments:
  - id: reverse-text
    groupSize: 8
  trainer:
    optimizer:
      lr: 1e-4
status:
  phase: Running
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_manifest(text, "run.yaml")
    return str(error.value).splitlines()


def replaced(old: str, new: str) -> list[str]:
    assert old in MANIFEST
    return problems(MANIFEST.replace(old, new, 1))


def test_manifest_printed_by_cluster_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MANIFEST)
    run = read_manifest(file)
    assert (run.metadata.name, run.metadata.namespace, run.spec.trainer.optimizer.lr) == ("quick", "team-a", 1e-4)


def test_json_is_yaml() -> None:
    text = (
        '{"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "a"}, '
        '"spec": {"model": {"path": "m"}, "environments": [{"id": "x"}]}}'
    )
    assert parse_manifest(text, "run.json")[0].spec.environments[0].id == "x"


def test_other_kinds_in_manifest_are_ignored() -> None:
    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\n---\n"
    assert parse_manifest(claim + MANIFEST + "---\n", "run.yaml")[0].metadata.name == "quick"
    assert problems(claim + MANIFEST.replace("1e-4", "0"))[0].startswith(
        "run.yaml:21: spec.trainer.optimizer.lr: got 0"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml: contains nothing, expected exactly one RLRun"),
        ("- 1\n", "run.yaml: contains no mapping, expected exactly one RLRun"),
        (
            MANIFEST + "---\n" + MANIFEST,
            "run.yaml: contains 2 RLRuns (lines 1, 21), expected exactly one; split the file",
        ),
        ("kind: A\n---\nkind: B\n", "run.yaml: contains 2 documents (A, B), expected exactly one RLRun"),
    ],
)
def test_exactly_one_run(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_another_type_is_refused_before_its_fields() -> None:
    assert replaced("rlrun.io/v1alpha1", "rlrun.io/v1") == [
        "run.yaml:1: apiVersion: got 'rlrun.io/v1', expected rlrun.io/v1alpha1; write apiVersion: rlrun.io/v1alpha1"
    ]
    assert replaced("kind: RLRun", "kind: rlrun") == [
        "run.yaml:2: kind: got 'rlrun', expected RLRun; write kind: RLRun"
    ]
    assert problems("foo: 1\n") == [
        "run.yaml:1: apiVersion: required, but not set: the file has foo; write apiVersion: rlrun.io/v1alpha1 and kind: RLRun for a run"
    ]


def test_snake_case_is_refused_as_the_api_server_does() -> None:
    assert replaced("groupSize", "group_size") == [
        "run.yaml:14: spec.environments[0].group_size: unknown field (did you mean groupSize?)"
    ]


def test_misplaced_field_gets_correct_path() -> None:
    assert replaced("seqLen: 512", "batchSize: 8\n  seqLen: 512")[0] == (
        "run.yaml:11: spec.batchSize: unknown field (did you mean spec.orchestrator.batchSize?); write orchestrator: {batchSize: 8}"
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "seqLen: 512",
            "seqLen: '512'",
            'run.yaml:11: spec.seqLen: got "512" (a string), expected a whole number from 16',
        ),
        ("seqLen: 512", "seqLen: 1", "run.yaml:11: spec.seqLen: got 1, expected a whole number from 16 to 16777216"),
        ("lr: 1e-4", "lr: .nan", "run.yaml:17: spec.trainer.optimizer.lr: got NaN, expected a number greater than 0"),
        ("lr: 1e-4", "lr:", "run.yaml:17: spec.trainer.optimizer.lr: got null, expected a number greater than 0"),
        (
            "tiny: {}",
            "tiny: {hiddenSize: 20}",
            "run.yaml:10: spec.model.tiny.hiddenSize: got 20, expected a whole number",
        ),
        ("  - id: reverse-text\n    groupSize: 8", "    id: x", "run.yaml:12: spec.environments: got {"),
        (
            "name: quick",
            "name: Quick",
            "run.yaml:4: metadata.name: 'Quick' is not an RFC 1035 label: lower-case letters",
        ),
        (
            "name: quick",
            "name: " + "a" * 41,
            "has 41 characters, but the names of its pods allow at most 40; choose a shorter name",
        ),
        ("name: quick", 'name: "quick\\n"', "is not an RFC 1035 label"),
        ("id: reverse-text\n    ", "", "run.yaml:13: spec.environments[0].id: required, but not set"),
        ("  - id: reverse-text\n    groupSize: 8", "    []", "environments is empty, but task RL needs at least one"),
    ],
)
def test_wrong_value_names_line_field_and_expected_value(old: str, new: str, problem: str) -> None:
    (line,) = replaced(old, new)
    assert problem in line


def test_problems_are_listed_in_file_order() -> None:
    text = MANIFEST.replace("seqLen: 512", "seqLen: x").replace("groupSize", "groupsize").replace("1e-4", "-1")
    assert [line.split(": ")[0] for line in problems(text)] == ["run.yaml:11", "run.yaml:14", "run.yaml:17"]


def test_missing_manifest_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        read_manifest(tmp_path / "none.yaml")
