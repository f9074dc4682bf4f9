"""What is wrong with a configuration, told one line per problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing to mend."""

    source: str
    """Where the value came from: a file's name, `command line`, `environment` or `configuration`."""
    path: str
    """The field as the user spelled it; empty for the whole source."""
    message: str
    """What is wrong and what is expected."""
    line: int | None = None
    """Line in the source, from 1."""

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        return _one_line(": ".join(part for part in (where, self.path, self.message) if part))


class ConfigError(Exception):
    """A configuration with problems; `str()` is one line for each, in the order of the source."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def _one_line(text: str) -> str:
    """Escape what would break the line or cannot be printed (control characters, lone surrogates)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
