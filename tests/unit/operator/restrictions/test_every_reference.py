"""Every field of an RLRun that names something of the namespace is judged: one that is added later has to be, too."""

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


def fields(
    schema: Mapping[str, Any], defs: Mapping[str, Any], path: str = "", seen: tuple[str, ...] = ()
) -> Iterator[str]:
    """Paths of a JSON schema's properties."""
    if (ref := schema.get("$ref")) is not None:
        if ref not in seen:
            yield from fields(defs[ref.rpartition("/")[2]], defs, path, (*seen, ref))
        return
    for kind in ("anyOf", "allOf", "oneOf"):
        for part in schema.get(kind, ()):
            yield from fields(part, defs, path, seen)
    if isinstance(schema.get("items"), Mapping):
        yield from fields(schema["items"], defs, f"{path}[]", seen)
    for name, inner in schema.get("properties", {}).items():
        there = f"{path}.{name}" if path else name
        yield there
        yield from fields(inner, defs, there, seen)


def judged(rule: Rule, path: str) -> Iterator[str]:
    """Paths that the table limits."""
    match rule:
        case Fields():
            if rule.closed:
                yield path
            for name, inner in rule.fields.items():
                yield from judged(inner, f"{path}.{name}" if path else name)
        case Each():
            yield from judged(rule.element, f"{path}[]")
        case Listed():
            yield path


def test_every_field_that_names_something_of_the_namespace_is_judged() -> None:
    schema = RLRunSpec.model_json_schema(by_alias=True)
    found = {path for path in fields(schema, schema["$defs"]) if NAMES_SOMETHING.search(path.rpartition(".")[2])}
    known = set(judged(REST, "")).union(*(judged(ROLE, role) for role in ROLES))
    lists = {path.partition("[]")[0] for path in known}
    assert {"trainer.podTemplate", "storage.claimName", "environments[].image", "inference.image"} <= found
    assert found - known - lists - HARMLESS.keys() == set()
    assert isinstance(POD_TEMPLATE, Fields)
    assert POD_TEMPLATE.closed
