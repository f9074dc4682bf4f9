"""Notations of strings that a regular expression checks and words explain: a user never has to read the expression."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
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
