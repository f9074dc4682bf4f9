"""Foreign text on a terminal, in a log or in a status: escaped, on one line, of limited length.

Foreign text comes from models, environments, files and the cluster.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

_HIDDEN = (
    r"\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
"""Controls (terminal escapes among them), formats (which turn the direction of text), lone surrogates, line and paragraph separators.

Of Unicode's format characters the two joiners stay, because emoji and some scripts depend on them.
"""
_DIRECTION = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_IN_A_LINE, _IN_LINES = re.compile(rf"[\x00-\x1f{_HIDDEN}]"), re.compile(rf"[\x00-\x08\x0b-\x1f{_HIDDEN}]")


def escape_controls(text: str, *, lines: bool = False) -> str:
    r"""Replace characters that control a terminal by escapes such as `\x1b` and `\u202e`.

    A second call changes nothing.

    Args:
        text: any string, even if no encoding can represent it.
        lines: whether line feeds and tabs stay.
    """
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escape_character, text)


def printable_document(value: object) -> object:
    """Return a JSON document whose texts are printable; line feeds and tabs stay."""
    if isinstance(value, str):
        return escape_controls(value, lines=True)
    if isinstance(value, Mapping):
        return {escape_controls(str(key)): printable_document(one) for key, one in value.items()}
    return [printable_document(one) for one in value] if isinstance(value, list | tuple) else value


class _Stream:
    """Text stream that shows direction controls as escapes; everything else is delegated to the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text and return its length."""
        self._stream.write(_DIRECTION.sub(_escape_character, text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def without_direction_controls() -> Iterator[None]:
    r"""Show direction controls (`\u202e`) as escapes in all printed text during the block.

    Other escapes stay, because views print their own colors.
    """
    with redirect_stdout(cast("TextIO", _Stream(sys.stdout))), redirect_stderr(cast("TextIO", _Stream(sys.stderr))):
        yield


def _escape_character(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


MESSAGE_MAX = 2000
"""Longest message in the status, in characters."""


def shorten_text(text: str, limit: int = MESSAGE_MAX) -> str:
    """Return `text` as one printable line of at most `limit` characters."""
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def bound_message(parts: Iterable[str]) -> str:
    """Join `parts` into one message of at most `MESSAGE_MAX` characters, with the number of omitted parts."""
    shown: list[str] = []
    left = MESSAGE_MAX
    every = [shorten_text(part, 600) for part in parts]
    for part in every:
        left -= len(part) + 2
        if left < 40 and shown:
            break
        shown.append(part)
    more = len(every) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
