"""Expansion of shell words: variables, arrays, arithmetic. Commands in `$(...)` are never run; they count as unset."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from rlrun.convert.readers.shell_words import bracket_end, quote_end

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#])(\[(.*?)\])?(.*)", re.DOTALL)
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
_LARGEST = 10**15
Variables = MutableMapping[str, "str | list[str]"]


@dataclass
class Expansion:
    """Fields of one word, and what in it nothing sets."""

    fields: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)


def expand(raw: str, variables: Variables) -> Expansion:
    """The fields that a raw word becomes; an empty unquoted expansion becomes none."""
    state = _Word(variables)
    state.scan(raw, quoted=False)
    return Expansion(state.end(), state.unset)


def text_of(raw: str, variables: Variables) -> Expansion:
    """As `expand`, for a place that takes one text: an assignment, a condition. One field, joined by blanks."""
    state = _Word(variables, splits=False)
    state.scan(raw, quoted=False)
    return Expansion([" ".join(state.end())], state.unset)


class _Word:
    def __init__(self, variables: Variables, *, splits: bool = True) -> None:
        self.variables, self.splits = variables, splits
        self.done: list[str] = []
        self.current: str | None = None
        self.unset: list[str] = []

    def end(self) -> list[str]:
        return [*self.done, *([self.current] if self.current is not None else [])]

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def scan(self, raw: str, *, quoted: bool) -> None:
        at = 0
        while at < len(raw):
            char = raw[at]
            if char == "\\" and at + 1 < len(raw):
                at = self._escape(raw, at, quoted=quoted)
            elif char == "'" and not quoted:
                end = quote_end(raw, at)
                self.add(raw[at + 1 : end - 1])
                at = end
            elif char == '"' and not quoted:
                end = quote_end(raw, at)
                self._quoted(raw[at + 1 : end - 1])
                at = end
            elif char == "$" and at + 1 < len(raw):
                at = self._dollar(raw, at, quoted=quoted)
            else:
                self.add(char)
                at += 1

    def _quoted(self, inside: str) -> None:
        if re.fullmatch(r"\$(@|\{[A-Za-z_]\w*\[@\]\}|\{@\})", inside):
            self._many(self._value(inside.strip("${}").removesuffix("[@]"))[0])
            return
        self.add("")
        self.scan(inside, quoted=True)

    def _escape(self, raw: str, at: int, *, quoted: bool) -> int:
        after = raw[at + 1]
        if after != "\n":
            self.add(after if not quoted or after in '"\\$`' else "\\" + after)
        return at + 2

    def _dollar(self, raw: str, at: int, *, quoted: bool) -> int:
        if raw.startswith("$((", at):
            end = bracket_end(raw, at + 1)
            self.add(self._arithmetic(raw[at + 3 : end - 2]))
            return end
        if raw[at + 1] == "(":
            end = bracket_end(raw, at + 1)
            self.unset.append(raw[at:end])
            return end
        if raw[at + 1] == "{":
            end = bracket_end(raw, at + 1)
            self._put(self._parameter(raw[at + 2 : end - 1]), quoted=quoted)
            return end
        if (name := _NAME.match(raw, at + 1)) is None:
            self.add("$")
            return at + 1
        self._put(self._known(name[0]), quoted=quoted)
        return name.end()

    def _put(self, value: list[str], *, quoted: bool) -> None:
        text = " ".join(value)
        if quoted or not self.splits:
            self.add(text)
            return
        parts = text.split()
        if text[:1].isspace() and self.current is not None:
            self._close()
        if parts:
            self.add(parts[0])
            self._more(parts[1:])
        if parts and text[-1].isspace():
            self._close()

    def _many(self, values: list[str]) -> None:
        if values:
            self.add(values[0])
            self._more(values[1:])

    def _more(self, values: list[str]) -> None:
        for value in values:
            self._close()
            self.add(value)

    def _close(self) -> None:
        if self.current is not None:
            self.done.append(self.current)
        self.current = None

    def _value(self, name: str) -> tuple[list[str], bool]:
        if name in ("@", "*"):
            return [], True  # the script's own arguments: none
        if name.isdigit():
            return [], False
        if name == "#":
            return ["0"], True
        value = self.variables.get(name)
        return ([], False) if value is None else ([value] if isinstance(value, str) else value, True)

    def _known(self, name: str) -> list[str]:
        value, known = self._value(name)
        if not known:
            self.unset.append(name)
        return value

    def _parameter(self, inside: str) -> list[str]:
        """The value of `${inside}`."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            self.unset.append(inside)
            return []
        length, name, _, index, rest = match.groups()
        if rest[:1] == "-" or rest[:2] in (":-", ":=", ":?", "=") or rest[:2] == ":+" or rest[:1] == "+":
            return self._with_default(name, rest)
        value = self._known(name)
        if index and index.isdigit():
            value = value[int(index) : int(index) + 1]
        if length:
            return [str(len(value) if index else len("".join(value)))]
        return [_edited(" ".join(value), rest)] if rest else value

    def _with_default(self, name: str, rest: str) -> list[str]:
        value, known = self._value(name)
        colon = rest.startswith(":")
        sign, default = rest[colon], rest[colon + 1 :]
        there = known and (bool("".join(value)) or not colon)
        if sign == "+":
            return [self._inner(default)] if there else []
        if there:
            return value
        if sign == "?":
            self.unset.append(name)
            return []
        return [self._inner(default)]

    def _inner(self, raw: str) -> str:
        found = text_of(raw, self.variables)
        self.unset += found.unset
        return found.fields[0]

    def _arithmetic(self, expression: str) -> str:
        found = text_of(re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression), self.variables)
        self.unset += found.unset
        try:
            return str(self._number(ast.parse(found.fields[0].strip().replace("/", "//"), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            self.unset.append(f"$(({expression}))")
            return ""

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int("".join(self._known(node.id)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and (apply := _ARITHMETIC.get(type(node.op))) is not None:
            result = apply(self._number(node.left), self._number(node.right))
            if abs(result) <= _LARGEST:
                return result
        raise ValueError("no arithmetic of whole numbers")


def _edited(text: str, rest: str) -> str:
    """`${name<rest>}` for a rest that edits the value: replacement, removal at an end, case."""
    if rest.startswith("/"):
        old, _, new = rest.lstrip("/").partition("/")
        return text.replace(old, new, -1 if rest.startswith("//") else 1)
    if rest.startswith("#"):
        greedy, pattern = rest.startswith("##"), rest.lstrip("#")
        cuts = range(len(text), -1, -1) if greedy else range(len(text) + 1)
        return next((text[cut:] for cut in cuts if fnmatch.fnmatchcase(text[:cut], pattern)), text)
    if rest.startswith("%"):
        greedy, pattern = rest.startswith("%%"), rest.lstrip("%")
        cuts = range(len(text) + 1) if greedy else range(len(text), -1, -1)
        return next((text[:cut] for cut in cuts if fnmatch.fnmatchcase(text[cut:], pattern)), text)
    if rest in (",,", "^^"):
        return text.lower() if rest == ",," else text.upper()
    return text
