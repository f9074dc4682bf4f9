"""Policy restrictions cover every RLRun field that refers to an object of the namespace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlrun.api.resource import RLRunSpec
from rlrun_operator.names import ROLES
from rlrun_operator.restrictions.allowed_fields import POD_TEMPLATE, REST, ROLE, Each, Fields, Listed, Rule

NAMES_SOMETHING = re.compile(r"(?i)(secret|claim|account|image|priorityclass|template)s?(name|ref|keyref|prefix)?$")
HARMLESS = {
    "storage.claimTemplate": "a claim that the run makes",
    "model.chatTemplate": "text",
}


def list_paths(
    schema: Mapping[str, Any], defs: Mapping[str, Any], path: str = "", seen: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the paths of a JSON schema's properties."""
    if (ref := schema.get("$ref")) is not None:
        if ref not in seen:
            yield from list_paths(defs[ref.rpartition("/")[2]], defs, path, (*seen, ref))
        return
    for kind in ("anyOf", "allOf", "oneOf"):
        for part in schema.get(kind, ()):
            yield from list_paths(part, defs, path, seen)
    if isinstance(schema.get("items"), Mapping):
        yield from list_paths(schema["items"], defs, f"{path}[]", seen)
    for name, inner in schema.get("properties", {}).items():
        there = f"{path}.{name}" if path else name
        yield there
        yield from list_paths(inner, defs, there, seen)


def list_limited_paths(rule: Rule, path: str) -> Iterator[str]:
    """Yield the paths that the restriction table limits."""
    match rule:
        case Fields():
            if rule.closed:
                yield path
            for name, inner in rule.fields.items():
                yield from list_limited_paths(inner, f"{path}.{name}" if path else name)
        case Each():
            yield from list_limited_paths(rule.element, f"{path}[]")
        case Listed():
            yield path


def test_reference_fields_are_covered_by_restrictions() -> None:
    schema = RLRunSpec.model_json_schema(by_alias=True)
    found = {path for path in list_paths(schema, schema["$defs"]) if NAMES_SOMETHING.search(path.rpartition(".")[2])}
    known = set(list_limited_paths(REST, "")).union(*(list_limited_paths(ROLE, role) for role in ROLES))
    lists = {path.partition("[]")[0] for path in known}
    assert {"trainer.podTemplate", "storage.claimName", "environments[].image", "inference.image"} <= found
    assert found - known - lists - HARMLESS.keys() == set()
    assert isinstance(POD_TEMPLATE, Fields)
    assert POD_TEMPLATE.closed
