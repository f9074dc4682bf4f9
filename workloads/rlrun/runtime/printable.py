"""Text of others (models, environments, files, the cluster's objects) on its way to a terminal, a log or a status."""

from __future__ import annotations

import re

_HIDDEN = (
    r"\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
"""Controls (terminal escapes among them), formats (which turn the direction of text), lone surrogates, line and paragraph separators.

Of Unicode's formats the two joiners stay, without which emoji and some scripts are other text.
"""
_IN_A_LINE, _IN_LINES = re.compile(rf"[\x00-\x1f{_HIDDEN}]"), re.compile(rf"[\x00-\x08\x0b-\x1f{_HIDDEN}]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Write everything that a terminal would obey rather than show as an escape: `\x1b`, `\u202e`.

    Doing it twice changes nothing more.

    Args:
        text: any string, also one that no encoding can hold.
        lines: line feeds and tabs stay.
    """
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
