"""Filter for log lines before a terminal: removes secrets and characters that control a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlrun.runtime import redact
from rlrun.runtime.printable import printable

_BEGIN, _END = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"), re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY")
_KEY_LINES = 200
"""Maximum number of lines of a private key: after that, a log that was truncated within a key is shown again."""


class LogLines:
    """Filter of the lines of one log, in order: a private key spans lines.

    Args:
        environment: environment variables of this process; the values of its secret variables are known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = redact.known_secrets(environment)
        self._within = 0

    def clean(self, line: str) -> str:
        """Return a line without secrets; all lines within a private key are secret."""
        if self._within:
            self._within = 0 if _END.search(line) else self._within - 1
            return redact.REMOVED
        if _BEGIN.search(line) and not _END.search(line):
            self._within = _KEY_LINES
        return printable(redact.redact_text(line, self._known), lines=True)
