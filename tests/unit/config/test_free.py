"""Limits of values with user-defined structure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rlrun.config.base import CHARACTERS_MAX, LEVELS_MAX, FreeMapping, count_levels
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.yaml_text import examine_yaml

FREE: TypeAdapter[Any] = TypeAdapter(FreeMapping)


def nested(depth: int) -> dict[str, Any]:
    """Return a mapping that contains `depth` nested lists and mappings, including itself."""
    value: Any = 1
    for i in range(depth - 1):
        value = [value] if i % 2 else {"a": value}
    return {"x": value}


@pytest.mark.parametrize(("value", "depth"), [(1, 0), ("[[", 0), ([], 1), ({}, 1), ([1, [2, {"a": []}]], 4)])
def test_levels_are_counted(value: Any, depth: int) -> None:
    assert count_levels(value) == depth
    assert count_levels(nested(50_000)) == 50_000


def test_nesting_is_limited() -> None:
    assert FREE.validate_python(nested(LEVELS_MAX)) == nested(LEVELS_MAX)
    for depth in (LEVELS_MAX + 1, 300, 3000):
        with pytest.raises(
            ValidationError, match=f"nested {depth} levels deep, but at most {LEVELS_MAX} are allowed; flatten it"
        ):
            FREE.validate_python(nested(depth))


def test_value_length_is_limited() -> None:
    text = "é" * (CHARACTERS_MAX - len('{"x":""}'))
    assert FREE.validate_python({"x": text}) == {"x": text}
    with pytest.raises(ValidationError, match="put it into a file"):
        FREE.validate_python({"x": text + "x"})


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000, "x: " + "[" * 9000])
def test_uncomposable_yaml_is_refused_with_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml:3: .*(nested lists and mappings; flatten it|not YAML)"):
        examine_yaml(f"a: 1\nb: 2\nc: {text}\n", "run.yaml")
