"""Argo CD objects of examples/gitops: existing paths and valid chart values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlrun.defaults.team_defaults import read_defaults
from tests.processes.chart.rendering import Render

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "gitops" / "argocd"


def load_documents() -> list[dict[str, Any]]:
    return [document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def fill_template(value: Any, elements: dict[str, str]) -> Any:
    """Fill a template with the values of an element."""
    if isinstance(value, dict):
        return {key: fill_template(inner, elements) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill_template(inner, elements) for inner in value]
    for name, text in elements.items():
        value = value.replace(f"{{{{ .{name} }}}}", text) if isinstance(value, str) else value
    assert not isinstance(value, str) or "{{" not in value, value
    return value


def list_applications() -> Iterator[dict[str, Any]]:
    """Return all Applications, including generated ones of ApplicationSets."""
    for document in load_documents():
        if document["kind"] == "Application":
            yield document
        elif document["kind"] == "ApplicationSet":
            (generator,) = document["spec"]["generators"]
            for elements in generator["list"]["elements"]:
                yield fill_template(document["spec"]["template"], elements)


def test_each_application_has_existing_source_and_unique_name() -> None:
    found = list(list_applications())
    assert len({application["metadata"]["name"] for application in found}) == len(found) == 5
    for application in found:
        assert (ROOT / application["spec"]["source"]["path"]).is_dir(), application


def test_chart_accepts_values_of_each_team(render: Render) -> None:
    releases = [a["spec"] for a in list_applications() if a["spec"]["source"]["path"] == "charts/rlrun-operator"]
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


def test_team_project_allows_only_its_runs() -> None:
    (project,) = [document for document in load_documents() if document["kind"] == "AppProject"]
    spec, name = project["spec"], project["metadata"]["name"]
    assert [destination["namespace"] for destination in spec["destinations"]] == [name]
    assert spec["namespaceResourceWhitelist"] == [{"group": "rlrun.io", "kind": "RLRun"}]
    assert spec["clusterResourceWhitelist"] == []
