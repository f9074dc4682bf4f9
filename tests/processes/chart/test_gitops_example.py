"""The Argo CD objects of examples/gitops: paths that exist, and values that the chart takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlrun.defaults.team_defaults import read_defaults
from tests.processes.chart.rendering import Render

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "gitops" / "argocd"


def documents() -> list[dict[str, Any]]:
    return [document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def filled(value: Any, elements: dict[str, str]) -> Any:
    """A template with an element's values."""
    if isinstance(value, dict):
        return {key: filled(inner, elements) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, elements) for inner in value]
    for name, text in elements.items():
        value = value.replace(f"{{{{ .{name} }}}}", text) if isinstance(value, str) else value
    assert not isinstance(value, str) or "{{" not in value, value
    return value


def applications() -> Iterator[dict[str, Any]]:
    """All Applications, those that the ApplicationSets make included."""
    for document in documents():
        if document["kind"] == "Application":
            yield document
        elif document["kind"] == "ApplicationSet":
            (generator,) = document["spec"]["generators"]
            for elements in generator["list"]["elements"]:
                yield filled(document["spec"]["template"], elements)


def test_every_application_has_a_source_and_a_name_of_its_own() -> None:
    found = list(applications())
    assert len({application["metadata"]["name"] for application in found}) == len(found) == 5
    for application in found:
        assert (ROOT / application["spec"]["source"]["path"]).is_dir(), application


def test_the_chart_takes_the_values_of_each_team(render: Render) -> None:
    releases = [a["spec"] for a in applications() if a["spec"]["source"]["path"] == "charts/rlrun-operator"]
    assert len(releases) == 2
    for spec in releases:
        values = spec["source"]["helm"]["valuesObject"]
        assert values["watchNamespaces"] != [spec["destination"]["namespace"]]
        assert values["image"]
        assert set(values["images"]) == {"trainer", "inference"}, (
            "no image is published; orchestrators have the trainer's"
        )
        (config_map,) = [d for d in render(values) if d["kind"] == "ConfigMap"]
        assert read_defaults(config_map["data"]["defaults.yaml"], "a/b", "defaults.yaml").problems == ""


def test_a_teams_project_lets_in_its_runs_alone() -> None:
    (project,) = [document for document in documents() if document["kind"] == "AppProject"]
    spec, name = project["spec"], project["metadata"]["name"]
    assert [destination["namespace"] for destination in spec["destinations"]] == [name]
    assert spec["namespaceResourceWhitelist"] == [{"group": "rlrun.io", "kind": "RLRun"}]
    assert spec["clusterResourceWhitelist"] == []
