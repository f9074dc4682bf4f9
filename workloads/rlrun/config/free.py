"""Free-form values: parts of a configuration with fields defined elsewhere, such as an environment's arguments or a pod template."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, JsonValue

LEVELS_MAX = 32
"""Deepest nesting of lists and mappings. The deepest field of a pod is at level twelve."""
CHARACTERS_MAX = 131_072
"""Longest value as JSON, in characters. The configuration is stored in a ConfigMap, which is limited to one mebibyte."""


def count_levels(value: object) -> int:
    """Return the nesting depth of lists and mappings, including `value`; 0 for a scalar. Does not recurse."""
    depth, layer = 0, [value]
    while holders := [inner for inner in layer if isinstance(inner, dict | list)]:
        depth += 1
        layer = [child for inner in holders for child in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _not_too_deep(value: object) -> object:
    if (depth := count_levels(value)) > LEVELS_MAX:
        raise ValueError(
            f"nested {depth} levels deep, but at most {LEVELS_MAX} are allowed; flatten it, or put it into a file and set the file's name"
        )
    return value


def _not_too_large(value: object) -> object:
    length = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    if length > CHARACTERS_MAX:
        raise ValueError(
            f"{length} characters long as JSON, but at most {CHARACTERS_MAX} are allowed; put it into a file and set the file's name"
        )
    return value


FreeMapping = Annotated[dict[str, JsonValue], BeforeValidator(_not_too_deep), AfterValidator(_not_too_large)]
"""Mapping of plain data with limited depth and size. The depth is checked first, because pydantic's own limit has no clear message."""
