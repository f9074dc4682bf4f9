"""Notations of strings that a regular expression checks and words explain: a user never has to read the expression."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Format:
    """Metadata of a string type: `Annotated[str, Format(...)]`. The CRD carries the same check and the same words."""

    pattern: str
    """Regular expression of the whole string, in the syntax that Python and RE2 share; without anchors."""
    words: str
    """What the string is, as the end of `expected ...`; with examples."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: str) -> str:
        """The string as it is.

        Raises:
            ValueError: it does not have this format.
        """
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"got {json.dumps(value, ensure_ascii=False)}, expected {self.words}")
        return value


@dataclass(frozen=True)
class Distinct:
    """Metadata of a list whose items are known by a key or are their own: `x-kubernetes-list-type` map or set in the CRD.

    Managers that apply different items then share the list, and an item stays whole: none of its fields may have a default.
    """

    key: str | None = None
    """Field that no two items share; None: items are plain values."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, items: list[Any]) -> list[Any]:
        """The list as it is.

        Raises:
            ValueError: two items are the same.
        """
        keys = [item if self.key is None else getattr(item, self.key) for item in items]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                first = keys.index(key)
                what = f"{self.key} of items {first} and {i}" if self.key else f"items {first} and {i}"
                raise ValueError(f"got {json.dumps(key, ensure_ascii=False)} twice ({what}); remove one")
        return items


_SEGMENT = r"[^/\x00-\x1f]*[^/.\x00-\x1f][^/\x00-\x1f]*"
_MOUNTED = r"[^/:\x00-\x1f]*[^/:.\x00-\x1f][^/:\x00-\x1f]*"
"""A mount's path holds no colon."""
RunFolder = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Format(
        rf"/?{_SEGMENT}(/{_SEGMENT})*/?",
        "the name of a run on the same volume, or a folder: no '.' or '..' between its '/', and nothing that cannot be printed",
    ),
]
VolumePath = Annotated[
    str,
    Field(min_length=1, max_length=256),
    Format(
        rf"{_MOUNTED}(/{_MOUNTED})*",
        "a path below the volume's mount, such as datasets/words: no '/' at its ends, no '.' or '..', no ':', and nothing unprintable",
    ),
]
GuestPattern = Annotated[
    str,
    Field(min_length=1, max_length=41),
    Format(
        r"[a-z0-9]([-a-z0-9]*[a-z0-9])?|[a-z0-9][-a-z0-9]*[*]|[*]",
        "the name of a run, or the beginning of names followed by *, such as ann-*",
    ),
]
RunName = Annotated[
    str,
    Field(min_length=1, max_length=40),
    Format("[a-z0-9]([-a-z0-9]*[a-z0-9])?", "the name of a run: lower-case letters, digits, and '-' between them"),
]
RESERVED_VARIABLES = "RLRUN_"
"""Begins RLRun's own environment variables, the run's key among them."""


def _not_reserved(name: str) -> str:
    if name.startswith(RESERVED_VARIABLES):
        raise ValueError(f"got {json.dumps(name)}, one of RLRun's own variables, which no environment gets; remove it")
    return name


VariableName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"[A-Za-z_][A-Za-z0-9_]*\*?",
        "the name of an environment variable such as OPENAI_API_KEY, or with a star the beginning of names, AWS_*",
    ),
    AfterValidator(_not_reserved),
]
