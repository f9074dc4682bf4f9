"""Rules between fields, free-form values, and the base of all configuration models.

A rule consists of CEL expressions. Free-form values are parts of a configuration with fields defined elsewhere, such as an environment's
arguments or a pod template. The models have camelCase in files and snake_case in Python, refuse unknown keys, and use docstrings as
descriptions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, JsonValue
from pydantic.alias_generators import to_camel

_SPACED = re.compile(r"(?P<text>'(?:\\.|[^'\\])*')|\s*(?P<symbol>[-+*/%<>=!&|?:,()\[\]])\s*")

_EXPRESSION = re.compile(r"\{((?:[^{}]|\{(?:[^{}]|\{\})*\})*)\}")
"""Expression in a message. It may contain maps only if they are empty."""


@dataclass(frozen=True)
class Rule:
    """A condition on a block, and the message if it does not hold."""

    holds: str
    """CEL expression over `self`, true for a valid object."""
    message: str
    """Error text, with each `{expression}` replaced by its value: the field, its value and the fix."""
    field: str | None = None
    """Path below the object that the message refers to, such as `.batchSize`. Default: the object."""

    @property
    def parts(self) -> list[str]:
        """Message split into alternating texts and expressions."""
        return _EXPRESSION.split(self.message)

    def message_cel(self) -> str:
        """Return the message as a CEL expression."""
        parts = self.parts
        texts, values = parts[::2], parts[1::2]
        if not values:
            return quote_cel(self.message)
        template = "%s".join(text.replace("%", "%%") for text in texts)
        return f"{quote_cel(template)}.format([{','.join(compact_cel(value) for value in values)}])"


def compact_cel(expression: str) -> str:
    """Remove the spaces around operators and brackets of a CEL expression. Strings do not change."""
    return _SPACED.sub(lambda found: found["text"] or found["symbol"], expression)


def quote_cel(text: str) -> str:
    """Return `text` as a CEL string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def list_cel(names: Iterable[str]) -> str:
    """Return `names` as a CEL list of strings."""
    return f"[{','.join(quote_cel(name) for name in names)}]"


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


Fields = dict[str, Any]
"""Fields of a block by their Python names, as its model takes them."""


class Config(BaseModel):
    """Immutable base of every block. The docstring below a field is its description (`loading.schema`), also in `kubectl explain`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    EXAMPLES: ClassVar[Mapping[str, object]] = {}
    """Examples of required fields by their Python names, for the message about a missing field."""
    CEL_RULES: ClassVar[tuple[Rule, ...]] = ()
    """Conditions of the validators as CEL rules for the API server, with the same messages, so that `kubectl apply` fails immediately.

    Every model with a validator has rules. The tests check the same invalid manifests against both.
    """
