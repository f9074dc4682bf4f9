"""`kubectl apply` of malformed manifests without an operator: the API server names field, value and fix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError
from tests.controlplane.corpus import MALFORMED, Malformed

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
APPLY_SECONDS = 500.0
"""Time limit of one kubectl for all manifests, in seconds: a busy machine needs more than a minute."""
STRICT = ("--validate=strict",)
UNCHECKED = ("--validate=ignore",)
NEXT_MANIFEST = r"(?=error when creating|resource mapping not found)"
"""Start of kubectl's message for another file."""
SERVER_SIDE = ("--server-side", "--validate=strict")


def apply(cluster: Cluster, namespace: str, paths: Sequence[Path], *options: str) -> None:
    files = [word for path in paths for word in ("-f", str(path))]
    cluster.kubectl("apply", "-n", namespace, *files, *options, timeout=APPLY_SECONDS)


def refusal(cluster: Cluster, paths: Sequence[Path], *options: str) -> str:
    with pytest.raises(ClusterError) as error:
        apply(cluster, "default", paths, *options)
    return str(error.value)


def of_stage(*stages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [case for case in MALFORMED if case.stage in stages], ids=lambda case: case.name
    )


@pytest.fixture(scope="module")
def refusals(cluster: Cluster) -> Mapping[str, str]:
    """Refusals of one `kubectl apply` of all malformed manifests. One kubectl for each would take a minute longer."""
    refused = [case for case in MALFORMED if case.stage != "operator"]
    parts = re.split(NEXT_MANIFEST, refusal(cluster, [case.path for case in refused], *STRICT))
    return {case.name: "\n".join(part for part in parts if f'"{case.path}"' in part) for case in refused}


@of_stage("strict", "apply")
def test_malformed_manifest_is_refused_with_field_and_fix(refusals: Mapping[str, str], case: Malformed) -> None:
    message = refusals[case.name]
    assert re.search(case.expect, message), message
    assert case.field in message
    assert "evaluating rule" not in message, "a rule broke instead of judging"


@pytest.mark.full
def test_malformed_manifest_is_refused_without_kubectl_validation(cluster: Cluster) -> None:
    refused = [case for case in MALFORMED if case.stage == "apply"]
    message = refusal(cluster, [case.path for case in refused], *UNCHECKED)
    assert [case.name for case in refused if not re.search(case.expect, message)] == [], message
    assert cluster.kubectl("get", "rlr", "-n", "default", "-o", "name") == ""


@pytest.mark.full
def test_malformed_manifest_is_refused_by_server_side_apply(cluster: Cluster) -> None:
    refused = [case for case in MALFORMED if case.stage != "operator"]
    message = refusal(cluster, [case.path for case in refused], *SERVER_SIDE)
    named = [case.field.rpartition(".")[2].partition("[")[0] for case in refused]
    assert [field for field in named if field not in message] == [], message
    assert cluster.kubectl("get", "rlr", "-n", "default", "-o", "name") == ""


@pytest.mark.full
@of_stage("operator")
def test_api_server_accepts_defects_left_to_the_operator(cluster: Cluster, case: Malformed) -> None:
    apply(cluster, "default", [case.path], *STRICT, "--dry-run=server")


def test_examples_are_accepted(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, EXAMPLES, *STRICT, "--dry-run=server")


@pytest.mark.full
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_applied_again_is_unchanged(cluster: Cluster, namespace: str, path: Path) -> None:
    apply(cluster, namespace, [path], *SERVER_SIDE)
    generation = cluster.kubectl("get", "rlr", path.stem, "-n", namespace, "-o", "jsonpath={.metadata.generation}")
    apply(cluster, namespace, [path], *SERVER_SIDE)
    again = cluster.kubectl("get", "rlr", path.stem, "-n", namespace, "-o", "jsonpath={.metadata.generation}")
    assert generation == again, "applying the same manifest again is a change: Argo CD would never be in sync"
