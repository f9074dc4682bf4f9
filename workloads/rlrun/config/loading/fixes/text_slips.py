"""Common syntax errors in YAML and TOML files, recognized from the lines near the position of the parser's error.

A parser reports where it stops, which is often a line below the mistake, and describes its own grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlrun.config.loading.fixes.closest_values import closest_scalars
from rlrun.config.loading.schema import Shape

_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200b\u202f\u205f\u3000\ufeff]")
"""Characters that look like a space but are other characters."""
_CONFLICT = re.compile(r"(<{7}|={7}|>{7})(\s|$)")
_NAME = r"[A-Za-z_][\w.-]*"
_SHOWN = 60


@dataclass(frozen=True)
class Slip:
    """A mistake in one line."""

    line: int
    message: str


def yaml_slip(text: str, line: int | None, reason: str) -> Slip | None:
    """Return the mistake behind a YAML parser's error, or None if it is not recognized.

    Args:
        text: text of the file.
        line: line of the parser's error, from 1; None: unknown.
        reason: message of the parser.
    """
    lines = text.splitlines()
    if found := _find_in_file(lines):
        return found
    number = min(max(line or 1, 1), max(len(lines), 1))
    for at in [number, *(before for before in range(number - 1, max(number - 4, 0), -1))]:
        here = lines[at - 1] if at <= len(lines) else ""
        if here.strip() and not here.lstrip().startswith("#"):
            for find in _LINE_CHECKS:
                if (message := find(here)) is not None:
                    return Slip(at, message)
    return _explain_reason(lines, number, reason)


def toml_slip(text: str, line: int | None) -> Slip | None:
    """Return the mistake behind a TOML parser's error, or None if it is not recognized."""
    lines = text.splitlines()
    if (slip := _find_in_file(lines)) is not None:
        return slip
    here = lines[line - 1] if line is not None and 0 < line <= len(lines) else ""
    if line is None:
        return None
    if line == 1 and re.match(r"(apiVersion|kind)\s*:", here):
        return Slip(
            line,
            "is YAML, but the file's name ends in .toml; rename it to run.yaml, and start it with rlrun local run.yaml",
        )
    if found := re.fullmatch(rf"\s*({_NAME})\s*:\s*(\S.*?)\s*", here):
        return Slip(line, f"{_shorten_line(here)} is not TOML; write {found[1]} = {_toml_value(found[2])}")
    if (found := re.fullmatch(rf"\s*({_NAME})\s*=\s*([A-Za-z][\w./-]*)\s*", here)) and found[2] not in (
        "true",
        "false",
        "inf",
        "nan",
    ):
        return Slip(line, f"{_shorten_line(here)}: a string needs quotes; write {found[1]} = {_toml_value(found[2])}")
    return None


def _find_in_file(lines: Sequence[str]) -> Slip | None:
    first = next((at for at, line in enumerate(lines) if line.strip()), None)
    if first is not None and re.match(r"\s*<(!doctype html|html|head|body)\b", lines[first], re.IGNORECASE):
        return Slip(first + 1, "is an HTML page; download the raw file instead of the web page about it")
    for at, line in enumerate(lines):
        if (found := _CONFLICT.match(line)) and found[1][0] != "=":
            return Slip(
                at + 1,
                f"{found[1]} is a conflict marker of git; remove the markers, and keep one of both versions",
            )
    return None


def _find_invisible(line: str) -> str | None:
    found = _BLANKS.search(line)
    return (
        None
        if found is None
        else f"contains U+{ord(found[0]):04X}, which looks like a space; replace it by a plain space"
    )


def explain_template(line: str) -> str | None:
    """Return a message about a line with an unrendered template, or None."""
    found = re.search(r"\{[{%].*?(?:[%}]\}|$)", line)
    return (
        None
        if found is None
        else f"{_shorten_line(found[0])} is a template; render the file first, such as with helm template, or write the value"
    )


def _explain_tab(line: str) -> str | None:
    return r"is indented with a tab ('\t'); indent with spaces" if re.match(r"[ ]*\t|[ ]*-\s*\t", line) else None


def _no_blank(line: str) -> str | None:
    found = re.fullmatch(rf"\s*(?:- )?({_NAME}):([^\s/:'\"].*)", line)
    return (
        None
        if found is None
        else f"{_shorten_line(line)} has no space after its colon; write {found[1]}: {found[2].strip()}"
    )


def _explain_equals(line: str) -> str | None:
    found = re.fullmatch(rf"\s*(?:- )?({_NAME})\s*=\s*(\S.*)", line)
    return None if found is None else f"{_shorten_line(line)} is an assignment; write {found[1]}: {found[2].strip()}"


def _no_colon(line: str) -> str | None:
    found = re.fullmatch(rf"\s*({_NAME})\s+([^\s:#=]+)\s*", line)
    return None if found is None else f"{_shorten_line(line)} has no colon; write {found[1]}: {found[2]}"


def _explain_reserved(line: str) -> str | None:
    found = re.fullmatch(rf"\s*(?:- )?({_NAME}):\s+([%@`].*?)\s*", line)
    return (
        None
        if found is None
        else f"a value that starts with '{found[2][0]}' needs quotes; write {found[1]}: {json.dumps(found[2])}"
    )


def _open_quote(line: str) -> str | None:
    for quote in ('"', "'"):
        other = "'" if quote == '"' else '"'
        plain = re.sub(rf"{other}[^{other}]*{other}", "", line)
        plain = re.sub(r"(?<=\w)'(?=\w)", "", plain)
        if re.search(rf"(^|[\s:\[{{,-]){quote}", plain) and plain.count(quote) % 2:
            return f"{_shorten_line(line)} has an unclosed quote; close the {quote}"
    return None


def _two_colons(line: str) -> str | None:
    found = re.fullmatch(rf"\s*(?:- )?({_NAME}):\s+([^\s\"'{{\[|>&*!][^#]*:\s.*|[^\s\"'{{\[|>&*!].*:)\s*", line)
    return (
        None
        if found is None
        else f"{_shorten_line(line)} has two colons; put the value into quotes, or write {found[1]}: {{{found[2].strip()}}}"
    )


_LINE_CHECKS: Sequence[Callable[[str], str | None]] = (
    _find_invisible,
    explain_template,
    _explain_tab,
    _no_blank,
    _explain_equals,
    _no_colon,
    _explain_reserved,
    _open_quote,
    _two_colons,
)


def _explain_reason(lines: Sequence[str], number: int, reason: str) -> Slip | None:
    here = lines[number - 1] if number <= len(lines) else ""
    if found := re.search(r"undefined alias '([^']*)'", reason):
        return Slip(
            number,
            f"found undefined alias '{found[1]}'; write &{found[1]} before the aliased value, or write the value itself",
        )
    if "escape character" in reason:
        return Slip(number, "a backslash in double quotes starts an escape sequence; write the text in single quotes")
    if found := re.search(r"but found '([\]}])'", reason):
        return Slip(number, f"has a {found[1]} without its opening bracket; remove it")
    if "but found ','" in reason:
        return Slip(number, "has a ',' without a value before it; remove the comma")
    if "expected '<document start>'" in reason:
        return _lost_document(lines, number)
    if "found '<block mapping start>'" in reason or "mapping values are not allowed" in reason:
        return _explain_indentation(lines, number, here)
    return None


def _lost_document(lines: Sequence[str], number: int) -> Slip:
    """Return the mistake of content after `...`, or after a directive such as `%YAML 1.2`, without `---` between them."""
    for at in range(min(number, len(lines)), 0, -1):
        if lines[at - 1].startswith("%"):
            return Slip(
                at,
                f"{_shorten_line(lines[at - 1])} needs a line --- below it; remove it, because manifests do not need it",
            )
        if lines[at - 1].rstrip() == "...":
            return Slip(at, "... ends the document, but more lines follow; remove the line ...")
    return Slip(
        number,
        "starts another document, expected only one manifest; write --- above it, or indent it like the lines before",
    )


def _explain_indentation(lines: Sequence[str], number: int, here: str) -> Slip | None:
    before = next(
        (at for at in range(number - 1, 0, -1) if lines[at - 1].strip() and not lines[at - 1].lstrip().startswith("#")),
        None,
    )
    if before is None:
        return None
    own, other = (len(line) - len(line.lstrip(" ")) for line in (here, lines[before - 1]))
    if own == other:
        return None
    return Slip(
        number,
        f"mapping values are not allowed here: it is indented by {own} spaces, but line {before} by {other}; indent both the same",
    )


def _toml_value(text: str) -> str:
    """Return a text of YAML or Python as a value of TOML."""
    if re.fullmatch(r"[-+]?[\d_]+(\.\d+)?([eE][-+]?\d+)?|true|false|\".*\"|'.*'|\[.*\]|\{.*\}", text):
        return text
    switch = next(iter(closest_scalars(text, Shape("bool"), "")), None)
    return str(switch).lower() if isinstance(switch, bool) else json.dumps(text)


def _shorten_line(line: str) -> str:
    text = line.strip()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
