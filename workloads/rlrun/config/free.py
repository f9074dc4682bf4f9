"""Free-form values: parts of a configuration whose fields are defined elsewhere, such as an environment's arguments or a pod's template."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, JsonValue

LEVELS_MAX = 32
"""Lists and mappings inside each other. A pod's deepest field has twelve."""
CHARACTERS_MAX = 131_072
"""Length of the value as JSON: the configuration travels in a ConfigMap, which holds a mebibyte."""


def count_levels(value: object) -> int:
    """Number of lists and mappings inside each other, `value` included; 0 for a scalar. Without recursion."""
    depth, layer = 0, [value]
    while holders := [inner for inner in layer if isinstance(inner, dict | list)]:
        depth += 1
        layer = [child for inner in holders for child in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _not_too_deep(value: object) -> object:
    if (depth := count_levels(value)) > LEVELS_MAX:
        raise ValueError(
            f"nested {depth} levels deep, at most {LEVELS_MAX} are allowed: flatten it, or put it into a file that the value names"
        )
    return value


def _not_too_large(value: object) -> object:
    length = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    if length > CHARACTERS_MAX:
        raise ValueError(
            f"{length} characters long as JSON, at most {CHARACTERS_MAX} are allowed: put it into a file that the value names"
        )
    return value


FreeMapping = Annotated[dict[str, JsonValue], BeforeValidator(_not_too_deep), AfterValidator(_not_too_large)]
"""A mapping of any plain data, of bounded depth and size. The depth is judged first: pydantic's own limit has no words for users."""
