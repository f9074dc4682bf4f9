"""One rule between fields, as CEL expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
