"""The CRD is structural, small, documented and bounded, and what it fills in is what the models mean by unset."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.crd import RULES_KEY, crd, spec_schema, status_schema
from rlrun.api.resource import RLRunSpec
from rlrun.api.status import RLRunStatus
from rlrun.cli.crd import compact_size, crd_files
from rlrun.config.schema import walk

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
SMALLEST = {"model": {"path": "m"}, "environments": [{"id": "x"}]}
PARTS = [
    SMALLEST,
    SMALLEST | {"storage": {"claimTemplate": {}}, "evaluation": {}, "placement": {"topology": {"required": "a/b"}}},
    SMALLEST | {"trainer": {"optimizer": {"maxGradNorm": None}}, "failurePolicy": {"backoff": {"maxSeconds": 20}}},
    *(yaml.safe_load(path.read_text())["spec"] for path in EXAMPLES),
]
_ANY = "x-kubernetes-preserve-unknown-fields"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    return dict(nodes(schema))[path]


def filled_in(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server makes of `value`: nulls of fields that may not be null dropped, then defaults."""
    if isinstance(value, list):
        return [filled_in(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    result = dict(value)
    for name, inner in schema["properties"].items():
        if result.get(name, ...) is None and not inner.get("nullable"):
            del result[name]
        if name not in result and "default" in inner:
            result[name] = copy.deepcopy(inner["default"])
        if name in result:
            result[name] = filled_in(result[name], inner)
    return result


@pytest.mark.parametrize("schema", [spec_schema(), status_schema()], ids=["spec", "status"])
def test_it_is_structural(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "const"} & node.keys(), path
        assert "type" in node or "x-kubernetes-int-or-string" in node or _ANY in node, path
        assert not {"properties", "additionalProperties"} <= node.keys(), path
        if node.get("type") == "array":
            assert "items" in node, path


ROLES = ("trainer", "inference", "orchestrator")


def test_only_what_is_free_by_design_is_left_unchecked() -> None:
    free = {path for path, node in nodes(spec_schema()) if _ANY in node}
    roles = {f"{role}.podTemplate" for role in ROLES}
    kinds = ("nodeAffinity", "podAffinity", "podAntiAffinity")
    terms = ("requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution")
    roles |= {f"{role}.affinity.{kind}.{term}" for role in ROLES for kind in kinds for term in terms}
    options = {f"algorithm.{part}.options" for part in ("loss", "advantage")}
    options |= {f"environments[].algorithm.{part}.options" for part in ("loss", "advantage")}
    assert free == roles | options | {"environments[].args", "networkPolicy.extraEgress[]", "model.tiny.warmupArgs"}


def test_everything_that_a_rule_may_walk_over_is_bounded() -> None:
    for path, node in nodes(spec_schema()):
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if node.get("type") == "object" and "properties" not in node:
            assert "maxProperties" in node, path
        if node.get("type") == "integer" and not path.endswith("tolerationSeconds"):
            assert {"minimum", "maximum"} <= node.keys(), path


def test_it_fits() -> None:
    assert compact_size() < 70_000


def test_a_write_of_the_status_judges_no_rule() -> None:
    for half in (spec_schema(), status_schema()):
        assert [path for path, node in nodes(half) if {"x-kubernetes-validations", RULES_KEY} & node.keys()] == []


def test_every_field_is_there_and_ours_are_documented() -> None:
    for model, schema in ((RLRunSpec, spec_schema()), (RLRunStatus, status_schema())):
        by_path = dict(nodes(schema))
        for path, info in walk(model, "camel"):
            node, words = by_path[".".join(path)], " ".join((info.description or "").split())
            # Described at `spec.algorithm` and `spec.sampling`.
            again = len(path) > {("environments[]", "algorithm"): 3, ("environments[]", "sampling"): 2}.get(path[:2], 9)
            assert node.get("description", "") == ("" if again else words)


def test_bounds_choices_and_patterns_are_those_of_the_models() -> None:
    schema = spec_schema()
    lr = at(schema, "trainer.optimizer.lr")
    assert (lr["type"], lr["minimum"], lr["exclusiveMinimum"], lr["maximum"]) == ("number", 0, True, 10)
    assert at(schema, "model.tiny.hiddenSize")["multipleOf"] == 8
    assert at(schema, "model.dtype")["enum"] == ["float32", "bfloat16", "float16"]
    assert at(schema, "data.sources")["minItems"] == 1
    assert at(schema, "trainer.resources.limits[]")["x-kubernetes-int-or-string"] is True
    (rule,) = at(spec_schema(ruled=True), "storage.claimTemplate.size")[RULES_KEY]
    assert "expected a Kubernetes quantity such as 500m, 16Gi or 2Ti" in rule.message
    assert schema["required"] == ["model"]


@pytest.mark.parametrize("spec", PARTS, ids=range(len(PARTS)))
def test_what_is_filled_in_changes_nothing(spec: dict[str, Any]) -> None:
    stored = filled_in(spec, spec_schema())
    assert RLRunSpec.model_validate(stored) == RLRunSpec.model_validate(spec)
    assert stored["trainer"]["optimizer"]["lr"] > 0


def test_unset_stays_visible_where_it_means_something_of_its_own() -> None:
    stored = filled_in(SMALLEST, spec_schema())
    assert not {"processesPerReplica", "microBatchTokens", "image", "resources", "affinity"} & stored["trainer"].keys()
    assert "maxModelLen" not in stored["inference"]
    assert "sampling" not in stored["environments"][0]
    assert not {"storage", "evaluation"} & stored.keys()


def test_an_explicit_null_stays_where_it_means_off() -> None:
    stored = filled_in(SMALLEST | {"trainer": {"optimizer": {"maxGradNorm": None}}}, spec_schema())
    assert stored["trainer"]["optimizer"]["maxGradNorm"] is None


def test_the_status_has_no_defaults_and_one_owner() -> None:
    schema = status_schema()
    assert [path for path, node in nodes(schema) if "default" in node] == []
    assert schema["x-kubernetes-map-type"] == "atomic"


def test_the_printer_columns_show_fields_that_exist() -> None:
    (version,) = crd()["spec"]["versions"]
    fields = dict(nodes(status_schema()))
    for column in version["additionalPrinterColumns"]:
        if column["jsonPath"].startswith(".status."):
            assert fields[column["jsonPath"].removeprefix(".status.")]["type"] == column["type"]
    assert version["subresources"] == {"status": {}}


def test_the_chart_carries_the_same_crd_and_never_deletes_it() -> None:
    files = {Path(name).name: list(yaml.safe_load_all(text)) for name, text in crd_files().items()}
    for plain, kept in (("rlrun.io_rlruns.yaml", "rlruns.yaml"), ("rlrun.io_rlruns_policy.yaml", "policy.yaml")):
        for document in files[kept]:
            assert document["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert files[plain] == files[kept]
    assert files["rlruns.yaml"] == [crd()]
    assert not any("{{" in text for text in crd_files().values())
