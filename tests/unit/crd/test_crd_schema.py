"""The CRD is structural, small, documented and bounded, and does not change written objects."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rlrun.api.crd.definition import RULES_KEY, build_crd, spec_schema, status_schema
from rlrun.api.crd.frozen_fields import default_of
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import UNSERVED, RLRunStatus
from rlrun.config.loading.schema import field_meaning, walk_model
from tools.crd import crd_files

DEFAULTS = Path(__file__).parent / "golden" / "defaults.json"
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


@pytest.mark.parametrize("schema", [spec_schema(), status_schema()], ids=["spec", "status"])
def test_crd_schema_is_structural(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "const"} & node.keys(), path
        assert "type" in node or "x-kubernetes-int-or-string" in node or _ANY in node, path
        assert not {"properties", "additionalProperties"} <= node.keys(), path
        if node.get("type") == "array":
            assert "items" in node, path


ROLES = ("trainer", "inference", "orchestrator")


def test_unvalidated_fields_are_free_by_design() -> None:
    free = {path for path, node in nodes(spec_schema()) if _ANY in node}
    roles = {f"{role}.podTemplate" for role in ROLES}
    kinds = ("nodeAffinity", "podAffinity", "podAntiAffinity")
    terms = ("requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution")
    roles |= {f"{role}.affinity.{kind}.{term}" for role in ROLES for kind in kinds for term in terms}
    options = {f"algorithm.{part}.options" for part in ("loss", "advantage")}
    options |= {f"environments[].algorithm.{part}.options" for part in ("loss", "advantage")}
    options |= {
        f"{part}.chatTemplateArguments" for part in ("sampling", "environments[].sampling", "evaluation.sampling")
    }
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


def test_crd_size_stays_below_limit() -> None:
    # The API server stores the CRD as compact JSON, which must fit into an annotation of `kubectl apply`.
    assert len(json.dumps(build_crd(), separators=(",", ":"), ensure_ascii=False).encode()) < 88_000


def test_status_schema_has_no_validation_rules() -> None:
    for half in (spec_schema(), status_schema()):
        assert [path for path, node in nodes(half) if {"x-kubernetes-validations", RULES_KEY} & node.keys()] == []


def test_crd_contains_all_fields_with_descriptions() -> None:
    for model, schema in ((RLRunSpec, spec_schema()), (RLRunStatus, status_schema())):
        by_path = dict(nodes(schema))
        for path, owner, name in walk_model(model, "camel"):
            node, words = by_path[".".join(path)], " ".join(field_meaning(owner, name).split())
            told = (
                node.get("description", "").partition(" Default: ")[0]
                if model is RLRunSpec
                else node.get("description", "")
            )
            # Described at `spec.algorithm` and `spec.sampling`.
            where = {"environments[].algorithm": 3, "environments[].sampling": 2, "evaluation.sampling": 2}
            again = len(path) > where.get(".".join(path[:2]), 9)
            assert told == ("" if again else words.partition(" Default: ")[0])


def test_crd_bounds_choices_and_patterns_match_models() -> None:
    schema = spec_schema()
    lr = at(schema, "trainer.optimizer.lr")
    assert (lr["type"], lr["minimum"], lr["exclusiveMinimum"], lr["maximum"]) == ("number", 0, True, 10)
    assert at(schema, "model.tiny.hiddenSize")["multipleOf"] == 8
    assert at(schema, "model.dtype")["enum"] == ["float32", "bfloat16", "float16"]
    assert at(schema, "data.sources")["minItems"] == 1
    assert at(schema, "trainer.resources.limits[]")["x-kubernetes-int-or-string"] is True
    (rule,) = at(spec_schema(ruled=True), "storage.claimTemplate.size")[RULES_KEY]
    assert "expected a Kubernetes quantity above 0 with its unit, such as 100Gi or 2Ti" in rule.message
    assert schema["required"] == ["model"]


def test_crd_has_no_defaults_except_initial_status() -> None:
    assert [path for path, node in nodes(spec_schema()) if "default" in node] == []
    assert [node["default"] for _, node in nodes(status_schema()) if "default" in node] == [UNSERVED]
    assert RLRunStatus.model_validate(UNSERVED, strict=True).phase == "Unserved"


def test_description_ends_with_default() -> None:
    schema = spec_schema()
    assert at(schema, "trainer.optimizer.lr")["description"].endswith("Default: 1e-06.")
    assert at(schema, "failurePolicy.backoff.maxSeconds")["description"].endswith("Default: 300.0.")
    assert at(schema, "progress.action")["description"].endswith("Default: Restart.")
    assert "Default: " not in at(schema, "model.name")["description"]


def test_default_of_this_version_never_changes() -> None:
    """A stored run that omits the field would otherwise train differently from its next attempt."""
    now = dict(defaults(RLRunSpec))
    if os.environ.get("RLRUN_WRITE_GOLDEN"):
        DEFAULTS.write_text(
            json.dumps({**now, **json.loads(DEFAULTS.read_text() or "{}")}, indent=1, sort_keys=True) + "\n"
        )
    kept = json.loads(DEFAULTS.read_text())
    assert {path: now.get(path, "this field is gone") for path in kept} == kept
    assert now.keys() == kept.keys(), "new fields: RLRUN_WRITE_GOLDEN=1 notes their defaults"


def defaults(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Return path and default of each optional field."""
    for path, owner, name in walk_model(model, "camel"):
        info = owner.model_fields[name]
        value = default_of(info)
        if not info.is_required():
            yield ".".join(path), value


def test_explicit_null_is_allowed_only_to_disable() -> None:
    assert at(spec_schema(), "trainer.optimizer.maxGradNorm")["nullable"] is True
    nullable = {path for path, node in nodes(spec_schema()) if "nullable" in node}
    assert nullable == {"trainer.optimizer.maxGradNorm", "algorithm.critic.valueClip"}


def test_lists_of_named_items_can_have_several_managers() -> None:
    lists = {path: node for path, node in nodes(spec_schema()) if node.get("type") == "array"}
    shared = {path: node["x-kubernetes-list-type"] for path, node in lists.items() if "x-kubernetes-list-type" in node}
    named = {f"{role}.{field}": "map" for role in ROLES for field in ("env", "imagePullSecrets")}
    assert shared == named | {"trainer.guests": "set"}
    for path in named:
        assert lists[path]["x-kubernetes-list-map-keys"] == ["name"]
        assert lists[path]["items"]["required"] == ["name"]


def test_status_is_atomic() -> None:
    schema = status_schema()
    assert schema["x-kubernetes-map-type"] == "atomic"


def test_printer_columns_show_existing_fields() -> None:
    (version,) = build_crd()["spec"]["versions"]
    fields = dict(nodes(status_schema()))
    for column in version["additionalPrinterColumns"]:
        if column["jsonPath"].startswith(".status."):
            assert fields[column["jsonPath"].removeprefix(".status.")]["type"] == column["type"]


def test_scale_subresource_refers_to_engines() -> None:
    (version,) = build_crd()["spec"]["versions"]
    assert set(version["subresources"]) == {"status", "scale"}
    scale = version["subresources"]["scale"]
    halves = {".spec.": dict(nodes(spec_schema())), ".status.": dict(nodes(status_schema()))}
    kinds = {
        name: fields[path.removeprefix(half)]["type"]
        for name, path in scale.items()
        for half, fields in halves.items()
        if path.startswith(half)
    }
    assert kinds == {"specReplicasPath": "integer", "statusReplicasPath": "integer", "labelSelectorPath": "string"}


def test_chart_contains_same_crd_and_keeps_it() -> None:
    files = {Path(name).name: list(yaml.safe_load_all(text)) for name, text in crd_files().items()}
    for plain, kept in (("rlrun.io_rlruns.yaml", "rlruns.yaml"), ("rlrun.io_rlruns_policy.yaml", "policy.yaml")):
        for document in files[kept]:
            assert document["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert files[plain] == files[kept]
    assert files["rlruns.yaml"] == [build_crd()]
    assert not any("{{" in text for text in crd_files().values())
