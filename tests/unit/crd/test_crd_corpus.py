"""Malformed manifests in `rlrun validate`: the same refusals and messages as the API server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from rlrun.api.crd.definition import KEYS_KEY, RULES_KEY, spec_schema
from rlrun.api.run_manifest import parse_manifest
from rlrun.config.loading.problems import ConfigError
from tests.controlplane.corpus import MALFORMED, Malformed


def test_malformed_manifest_corpus_covers_all_stages() -> None:
    stages = [case.stage for case in MALFORMED]
    assert len(stages) >= 60
    assert min(stages.count(stage) for stage in set(stages)) >= 8


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_malformed_manifest_is_refused_with_field_value_and_fix(case: Malformed) -> None:
    if case.local is None:
        parse_manifest(case.path.read_text(), case.path.name)
        return
    with pytest.raises(ConfigError) as error:
        parse_manifest(case.path.read_text(), case.path.name)
    (line,) = str(error.value).splitlines()
    assert re.search(case.local, line), line
    assert case.field in line


def formatted(schema: dict[str, Any], path: str = "spec") -> Iterator[str]:
    """Return the paths of values and mapping keys that have a format; common fields of roles are listed once."""
    if any("self.matches(" in rule.holds and rule.message.startswith("got ") for rule in schema.get(RULES_KEY, ())):
        yield path
    if KEYS_KEY in schema:
        yield f"{path} key"
    for name, inner in schema.get("properties", {}).items():
        yield from formatted(
            inner, re.sub(r"^spec\.(trainer|inference|orchestrator)\.", "spec.ROLE.", f"{path}.{name}")
        )
    for key, suffix in (("items", "[]"), ("additionalProperties", "")):
        if isinstance(schema.get(key), dict):
            yield from formatted(schema[key], path + suffix)


def test_formatted_fields_have_malformed_manifests() -> None:
    """A field that loses its format then fails a manifest, here and on the API server."""
    said = set()
    for case in MALFORMED:
        path = re.sub(r"\[\d+\]", "[]", case.field)
        path = re.sub(r"^spec\.(trainer|inference|orchestrator)\.", "spec.ROLE.", path)
        said |= {path, f"{path} key"} if "key" in case.name or "resource-" in case.name else {path}
    wanted = dict.fromkeys(formatted(spec_schema(ruled=True)))
    assert [path for path in wanted if path not in said] == []
