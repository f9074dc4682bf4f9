"""The CustomResourceDefinition: a structural OpenAPI v3 schema with documentation and without defaults in `spec`.

Pure: models in, plain data out. Kubernetes requires a `type` everywhere and supports neither `$ref` nor `anyOf` (except for
int-or-string). So this module walks the models instead of translating pydantic's JSON schema. The rules between fields are in
`admission_policy`.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlrun.api.crd.frozen_fields import default_of, reading_defaults
from rlrun.api.kubernetes_types import NodeAffinity, PodAffinity
from rlrun.api.resource import API_VERSION, KIND, RLRun, RLRunSpec
from rlrun.api.run_status import UNSERVED, RLRunStatus
from rlrun.config.base import Rule, quote_cel
from rlrun.config.formats import Distinct, Format
from rlrun.config.loading.schema import field_meaning, shape_of
from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.rollout import EnvironmentConfig, EvaluationConfig
from rlrun.runtime.json_types import Json

_ANY: Json = {"x-kubernetes-preserve-unknown-fields": True}

PLURAL, SINGULAR, SHORT_NAMES, CATEGORIES = "rlruns", "rlrun", ["rlr"], ["all", "rl"]
GROUP, _, VERSION = API_VERSION.partition("/")
RULES_KEY = "rules"
"""Key of the rules of a value in `spec_schema(ruled=True)`."""
KEYS_KEY = "propertyNames"
"""Key of the schema of a mapping's keys, if the keys have rules."""

# Bounds for fields without bounds in the models: the API server estimates the cost of a rule from them.
STRING_MAX = 1024
ITEMS_MAX = 64
PROPERTIES_MAX = 64
INTEGER_MAX = 2**53 - 1
"""Larger integers are not exact in JSON."""

_KUBERNETES = "rlrun.api.kubernetes_types"
_DESCRIBED_ELSEWHERE = {
    *((EnvironmentAlgorithm, name) for name in EnvironmentAlgorithm.model_fields),
    (EnvironmentConfig, "sampling"),
    (EvaluationConfig, "sampling"),
}
"""Fields whose parts are not described again, because `spec.algorithm` and `spec.sampling` describe them; the CRD would be too large."""
_FREE: tuple[type[BaseModel], ...] = (NodeAffinity, PodAffinity)
"""Blocks of which the API server checks only the field names. Their terms, in every role, were a twentieth of the CRD."""
_BOUNDS = {
    "str": {"min_length": "minLength", "max_length": "maxLength"},
    "list": {"min_length": "minItems", "max_length": "maxItems"},
    "mapping": {"min_length": "minProperties", "max_length": "maxProperties"},
}
_SELECTABLE = (".status.phase",)
"""Fields that `kubectl get rlr --field-selector` supports (Kubernetes 1.31 and newer)."""
_SCALE = {
    "specReplicasPath": ".spec.inference.replicas",
    "statusReplicasPath": ".status.inference.desired",
    "labelSelectorPath": ".status.inference.selector",
}
"""Fields that `kubectl scale` and Kubernetes autoscalers read and write: the number of engines."""
_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.steps", 0),
    ("Reward", "number", ".status.progress.reward", 0),
    ("Trainer", "string", ".status.trainerReady", 0),
    ("Inference", "string", ".status.inferenceReady", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Ckpt", "integer", ".status.checkpoint.latestCompleteStep", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Reason", "string", ".status.reason", 1),
    ("Attempt", "integer", ".status.attempt", 1),
    ("Version", "integer", ".status.progress.policyVersion", 1),
    ("Staleness", "number", ".status.progress.stalenessMean", 1),
    ("Tok/s", "number", ".status.progress.tokensPerSecond", 1),
)


def build_crd() -> Json:
    """Return the CustomResourceDefinition `rlruns.rlrun.io`."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": SHORT_NAMES,
                "categories": CATEGORIES,
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, "scale": _SCALE},
                    "selectableFields": [{"jsonPath": path} for path in _SELECTABLE],
                    "additionalPrinterColumns": [_printer_column(*column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": _root_schema()},
                }
            ],
        },
    }


def _printer_column(name: str, kind: str, path: str, priority: int) -> Json:
    column = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


def _root_schema() -> Json:
    text = {name: _description_text(field_meaning(RLRun, name)) for name in RLRun.model_fields}
    return {
        "type": "object",
        "description": _description_text(RLRun.__doc__),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": text["api_version"]},
            "kind": {"type": "string", "description": text["kind"]},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": spec_schema(),
            "status": status_schema(),
        },
    }


def spec_schema(*, ruled: bool = False) -> Json:
    """Return the schema of `spec`; with `ruled`, including the `Rule`s of each value."""
    return _Writer(spec=True, ruled=ruled).model(RLRunSpec, _description_text(field_meaning(RLRun, "spec")))


def status_schema() -> Json:
    """Return the schema of `status`. It has no defaults except the status of a run that no operator has seen; missing values are unknown.

    The status is atomic: it has one writer, and owners of single fields would be a quarter of the object and of the cost of each write.
    """
    schema = _Writer(spec=False).model(RLRunStatus, _description_text(RLRunStatus.__doc__))
    return schema | {"x-kubernetes-map-type": "atomic", "default": dict(UNSERVED)}


class _Writer:
    """Writer of the schema of `spec` or `status`.

    Args:
        spec: whether the schema is for `spec` (written by users, with bounds and defaults in descriptions) or for `status`.
        described: whether fields get descriptions.
        ruled: whether values get their rules.
    """

    def __init__(self, *, spec: bool, described: bool = True, ruled: bool = False) -> None:
        self._spec, self._described, self._ruled = spec, described, ruled

    def model(self, model: type[BaseModel], description: str = "") -> Json:
        """Return the schema of a block."""
        schema: Json = {"type": "object"}
        if description and model.__module__ != _KUBERNETES:
            schema["description"] = description
        required = [info.alias or name for name, info in model.model_fields.items() if info.is_required()]
        if required:
            schema["required"] = required
        schema["properties"] = {
            info.alias or name: self._field_schema(model, name) for name, info in model.model_fields.items()
        }
        if self._ruled and (rules := _schema_rules(model)):
            schema[RULES_KEY] = rules
        return schema

    def _field_schema(self, owner: type[BaseModel], name: str) -> Json:
        info = owner.model_fields[name]
        described = self._described and owner.__module__ != _KUBERNETES
        description = (
            _description_text(f"{field_meaning(owner, name)} {_shown_default(info) if self._spec else ''}")
            if described
            else ""
        )
        here = self._described and (owner, name) not in _DESCRIBED_ELSEWHERE
        inside = _Writer(spec=self._spec, described=here, ruled=self._ruled)
        schema = dict(_ANY) if owner in _FREE else inside._type_schema(info.annotation, info.metadata)
        inner = schema.pop("description", "")
        if description or inner:
            schema = {"description": description or inner} | schema
        if self._spec and default_of(info) is not None and type(None) in typing.get_args(info.annotation):
            schema["nullable"] = True
        return schema

    def _type_schema(self, annotation: object, metadata: Iterable[object] = ()) -> Json:
        """Return the schema of an annotation; `metadata` comes from its `Annotated` and `Field`."""
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            return self._type_schema(args[0], (*args[1:], *metadata))
        if origin in (typing.Union, types.UnionType):
            return self._union_schema([arg for arg in args if arg is not type(None)], metadata)
        shape = shape_of(annotation, metadata)
        bounds = dict(shape.bounds)
        match shape.kind:
            case "model":
                assert shape.model is not None
                return self.model(shape.model, _description_text(shape.model.__doc__))
            case "choice":
                return {"type": "string", "enum": list(shape.choices)}
            case "bool":
                return {"type": "boolean"}
            case "int" | "float":
                return self._number_schema(shape.kind, bounds)
            case "str":
                return self._string_schema(bounds, metadata)
            case "list":
                schema: Json = {"type": "array", "items": self._type_schema(args[0])}
                return schema | self._size_bounds("list", bounds, {"maxItems": ITEMS_MAX}) | _list_type(metadata)
            case "mapping":
                value = self._type_schema(args[1])
                schema = {"type": "object"}
                schema |= value if _is_any(value) else {"additionalProperties": value}
                if self._ruled and RULES_KEY in (key := self._type_schema(args[0])):
                    schema[KEYS_KEY] = key
                return schema | self._size_bounds("mapping", bounds, {"maxProperties": PROPERTIES_MAX})
            case _:
                return dict(_ANY)

    def _union_schema(self, members: list[object], metadata: Iterable[object]) -> Json:
        if len(members) == 1:
            return self._type_schema(members[0], metadata)
        schemas = [self._type_schema(member) for member in members]
        if {schema.get("type") for schema in schemas} != {"string", "integer"}:
            return dict(_ANY)
        text, number = sorted(schemas, key=lambda schema: schema["type"] != "string")
        schema = {"x-kubernetes-int-or-string": True, "maxLength": text["maxLength"], "minimum": number["minimum"]}
        if RULES_KEY in text:
            schema[RULES_KEY] = [replace(rule, holds=f"type(self) == int || {rule.holds}") for rule in text[RULES_KEY]]
        return schema

    def _number_schema(self, kind: str, bounds: Mapping[str, float]) -> Json:
        schema: Json = {"type": "integer"} if kind == "int" else {"type": "number"}
        for low in ("ge", "gt"):
            if low in bounds:
                schema["minimum"] = bounds[low]
        for high in ("le", "lt"):
            if high in bounds:
                schema["maximum"] = bounds[high]
        if "gt" in bounds:
            schema["exclusiveMinimum"] = True
        if "lt" in bounds:
            schema["exclusiveMaximum"] = True
        if "multiple_of" in bounds:
            schema["multipleOf"] = bounds["multiple_of"]
        if self._spec and kind == "int":
            schema.setdefault("maximum", INTEGER_MAX)
        return schema

    def _string_schema(self, bounds: Mapping[str, float], metadata: Iterable[object]) -> Json:
        schema: Json = {"type": "string"} | self._size_bounds("str", bounds, {"maxLength": STRING_MAX})
        formats = [item for item in metadata if isinstance(item, Format)]
        if self._ruled and formats:
            schema[RULES_KEY] = [_format_rule(item) for item in formats]
        return schema

    def _size_bounds(self, kind: str, bounds: Mapping[str, float], otherwise: Json) -> Json:
        sizes = {_BOUNDS[kind][key]: value for key, value in bounds.items() if key in _BOUNDS[kind]}
        return otherwise | sizes if self._spec else sizes


def _schema_rules(model: type[BaseModel]) -> list[Rule]:
    rules = [rule for base in reversed(model.__mro__) for rule in base.__dict__.get("CEL_RULES", ())]
    return [reading_defaults(rule, {"self": model}) for rule in rules]


def _format_rule(item: Format) -> Rule:
    return Rule(f"self.matches({quote_cel(f'^({item.pattern})$')})", f'got "{{self}}", expected {item.words}')


def _list_type(metadata: Iterable[object]) -> Json:
    """Return the list type for server-side apply: map or set. Other lists are atomic, because the order of their items matters."""
    for item in metadata:
        if isinstance(item, Distinct):
            keys = {"x-kubernetes-list-map-keys": [item.key]} if item.key else {}
            return {"x-kubernetes-list-type": "map" if item.key else "set"} | keys
    return {}


def _is_any(schema: Json) -> bool:
    return schema == _ANY


def _shown_default(info: FieldInfo) -> str:
    """Return the end of a description: the value that the operator uses if the field is not set."""
    value = default_of(info)
    if value is None or value == [] or value == {}:
        return ""
    return f"Default: {value if isinstance(value, str) else json.dumps(value)}."


def _description_text(text: str | None) -> str:
    return " ".join((text or "").split())
