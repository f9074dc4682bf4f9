"""Problems of a configuration, printed as one line each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlrun.runtime import redact
from rlrun.runtime.printable import escape_controls

COMMAND_LINE = "command line"
ENVIRONMENT = "environment"
CONFIGURATION = "configuration"
"""Sources of problems other than files. The last one is all sources together."""


@dataclass(frozen=True)
class Problem:
    """One problem for the user to fix."""

    source: str
    """Source of the value: a file's name, `command line`, `environment` or `configuration`."""
    path: str
    """Path of the field as the user spelled it; empty for the whole source."""
    message: str
    """Description of the error and of the expected value."""
    line: int | None = None
    """Line in the source, from 1."""

    def __post_init__(self) -> None:
        """Remove secrets: no message contains a value with the name of a secret, or a value that looks like a token."""
        object.__setattr__(self, "path", redact.redact_certain(self.path, []))
        object.__setattr__(self, "message", redact.redact_text(self.message, []))

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        return escape_controls(": ".join(part for part in (where, self.path, self.message) if part))


class ConfigError(Exception):
    """A configuration with problems. `str()` has one line per problem, in the order of the source."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))
