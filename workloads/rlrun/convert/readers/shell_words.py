"""Words of a shell script: division of a text into raw words and operators. Nothing is expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPERATORS = ("&&", "||", ";;", "|", ";", "&", "(", ")")
_REDIRECT = re.compile(r"<<<\s*\S+|\d*(>>|>|<)(&\d|\s*\S+)|&>\s*\S+")
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_CLOSES = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Token:
    """A raw word, quotes included, or an operator (`;` also for the end of a line)."""

    text: str
    line: int
    operator: bool = False


class UnclosedError(ValueError):
    """A quote or bracket has no end."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"{what} is not closed")
        self.line = line


def split(text: str) -> list[Token]:
    """Raw words and operators of a script, comments and redirections left out.

    Raises:
        UnclosedError: with the line where a quote or bracket begins.
    """
    tokens: list[Token] = []
    position, line = 0, 1
    until: list[str] = []
    while position < len(text):
        char = text[position]
        if text.startswith("\\\n", position):
            position, line = position + 2, line + 1
        elif char == "\n":
            tokens.append(Token(";", line, operator=True))
            position, line = position + 1, line + 1
            while until:
                end = _here_document_end(text, position, until.pop(0))
                position, line = end, line + text.count("\n", position, end)
        elif char.isspace():
            position += 1
        elif char == "#":
            position = _line_end(text, position)
        elif (here := _HERE_DOCUMENT.match(text, position)) is not None:
            until.append(here[1])
            position = here.end()
        elif (redirect := _REDIRECT.match(text, position)) is not None:
            position = redirect.end()
        elif (operator := next((each for each in _OPERATORS if text.startswith(each, position)), None)) is not None:
            tokens.append(Token(operator, line, operator=True))
            position += len(operator)
        else:
            end = _word_end(text, position, line)
            tokens.append(Token(text[position:end], line))
            line += text.count("\n", position, end)
            position = end
    return tokens


def _here_document_end(text: str, position: int, mark: str) -> int:
    """Position behind the line that is `mark` alone."""
    found = re.compile(rf"^\t*{mark}$\n?", re.MULTILINE).search(text, position)
    return found.end() if found is not None else len(text)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _word_end(text: str, start: int, line: int) -> int:
    """End of the raw word that begins at `start`."""
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            if text.startswith("\\\n", position):
                return position
            position += 2
        elif char in "'\"":
            position = quote_end(text, position, line)
        elif char == "$" and text[position + 1 : position + 2] in _CLOSES:
            position = bracket_end(text, position + 1, line)
        elif char == "`":
            position = _closing(text, "`", position + 1, "` of a command", line)
        elif char == "(" and _ARRAY.fullmatch(text[start:position]):
            position = bracket_end(text, position, line)
        elif char.isspace() or char in ";&|()<>":
            return position
        else:
            position += 1
    return min(position, len(text))


def quote_end(text: str, position: int, line: int = 0) -> int:
    """Position behind the quoted part that begins at `position`."""
    quote = text[position]
    if quote == "'":
        return _closing(text, "'", position + 1, "a quote (')", line)
    at = position + 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == "$" and text[at + 1 : at + 2] in _CLOSES:
            at = bracket_end(text, at + 1, line)
        elif text[at] == '"':
            return at + 1
        else:
            at += 1
    raise UnclosedError('a quote (")', line)


def bracket_end(text: str, position: int, line: int = 0) -> int:
    """Position behind the `(...)` or `{...}` that begins at `position`, with what is inside it."""
    opening = text[position]
    closing, depth, at = _CLOSES[opening], 0, position
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char in "'\"":
            at = quote_end(text, at, line)
        elif char == "#" and opening == "(" and text[at - 1].isspace():
            at = _line_end(text, at)
        else:
            depth += (char == opening) - (char == closing)
            at += 1
            if not depth:
                return at
    raise UnclosedError(opening, line)


def _closing(text: str, char: str, start: int, what: str, line: int) -> int:
    end = text.find(char, start)
    if end < 0:
        raise UnclosedError(what, line)
    return end + 1
