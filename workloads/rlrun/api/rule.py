"""One rule of the CRD, and how it becomes an entry of `x-kubernetes-validations`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACED = re.compile(r"(?P<text>'(?:\\.|[^'\\])*')|\s*(?P<symbol>[-+*/%<>=!&|?:,()\[\]])\s*")


@dataclass(frozen=True)
class Rule:
    """One entry of `x-kubernetes-validations`."""

    holds: str
    """CEL expression over `self`, true for a valid object."""
    message: str
    """What is wrong, with each `{expression}` replaced by its value: the field, its value and the fix."""
    field: str | None = None
    """Path below the object, such as `.batchSize`, that the message is about; default: the object."""
    forbidden: bool = False
    """The value may be right, but may not be set now."""

    def as_json(self) -> dict[str, str]:
        """As the CRD has it."""
        result = {"rule": compact(self.holds)}
        parts = re.split(r"\{([^{}]*)\}", self.message)
        texts, values = parts[::2], parts[1::2]
        if values:
            # `format` and not `+`: the API server takes the length of a number as a string for unbounded, and refuses the sum.
            template = "%s".join(text.replace("%", "%%") for text in texts)
            result["messageExpression"] = f"{quoted(template)}.format([{','.join(compact(value) for value in values)}])"
        else:
            result["message"] = self.message
        if self.field is not None:
            result["fieldPath"] = self.field
        if self.forbidden:
            result["reason"] = "FieldValueForbidden"
        return result


def compact(expression: str) -> str:
    """A CEL expression without the spaces beside its operators and brackets; strings are left alone."""
    return _SPACED.sub(lambda found: found["text"] or found["symbol"], expression)


def quoted(text: str) -> str:
    """`text` as a CEL string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
