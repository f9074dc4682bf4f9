"""Expansion of shell words: variables, arrays, arithmetic. Commands in `$(...)` are never executed; their output is unknown."""

from __future__ import annotations

import codecs
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

Value = str | list[str]
Variables = MutableMapping[str, Value]
_LARGEST = 10**15
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
NUMBER = re.compile(r"-?\d{1,15}")
_LONGEST = 200_000
"""Maximum characters of one word: `a=$a$a` in a loop doubles a value in each iteration."""
_ESCAPED = re.compile(r"\\(\n|.)", re.DOTALL)
_IN_QUOTES = re.compile(r'\\([$`"\\\n])')
_PLAIN = re.compile(r"[A-Za-z_]\w*")
_QUOTES = ("string", "translated_string")
_SUBSTITUTIONS = ("command_substitution", "process_substitution")
_EXPANSIONS = ("simple_expansion", "expansion", "arithmetic_expansion", *_SUBSTITUTIONS)
_BLANKS = re.compile(r"(\s|\\\n)*")
_REPLACING = ("/", "//", "/#", "/%")
_REMOVING = ("#", "##", "%", "%%")
_DEFAULTS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")


_MARK = "\ue000"
"""Delimiter around the name of an unknown value in an array item, so that the other items stay known."""


def mark_unknown(text: str, names: Sequence[str]) -> str:
    """Append the names of unknown values to a text."""
    return text + "".join(f"{_MARK}{name}{_MARK}" for name in names)


def split_marks(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a text without its marks, and the marked names."""
    parts = text.split(_MARK)
    return "".join(parts[::2]), tuple(parts[1::2])


class TooLongError(ValueError):
    """Error for a word that is longer than any command line."""


@dataclass
class Scope:
    """Variables and arguments that a word can refer to."""

    variables: Variables
    arguments: Sequence[str] | None = None
    """Arguments of the running function. None: arguments of the script, which are unknown."""
    unsure: dict[str, int] = field(default_factory=dict)
    """Variables whose value depends on an unknown command or condition, with the line."""


@dataclass
class Expansion:
    """Fields of one expanded word."""

    fields: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    """Names and commands without a known value."""
    is_known: bool = True
    """Whether a real shell always gets the same text; False after a command's output, an argument or an unknown condition."""

    @property
    def text(self) -> str:
        """All fields as one text."""
        return " ".join(self.fields)


def expand_word(node: Node, scope: Scope) -> Expansion:
    """Return the fields of a word; an empty expansion without quotes has no field."""
    word = _Word(scope)
    word.add_node(node, quoted=False)
    return word.end()


def expand_text(node: Node | None, scope: Scope) -> Expansion:
    """Return a word as one text, for assignments and conditions."""
    if node is None:
        return Expansion([""])
    word = _Word(scope, splits=False)
    word.add_node(node, quoted=False)
    found = word.end()
    text, names = split_marks(found.text)
    return Expansion([text], [*found.unset, *names], found.is_known and not names)


def source_of(node: Node) -> str:
    """Return the text of a node."""
    return (node.text or b"").decode("utf-8", "replace")


def _blanks_before(node: Node) -> str:
    """Return the blanks between two expansions in quotes, which tree-sitter-bash (0.25) assigns to the second one."""
    found = _BLANKS.match(source_of(node)) if node.type in _EXPANSIONS else None
    return found[0] if found is not None else ""


def list_pieces(node: Node) -> Iterator[Node | str]:
    """Yield the children of a node and the text between them, which the grammar omits."""
    text, at = node.text or b"", node.start_byte
    for child in node.children:
        if child.start_byte > at:
            yield text[at - node.start_byte : child.start_byte - node.start_byte].decode("utf-8", "replace")
        yield child
        at = child.end_byte


class _Word:
    def __init__(self, scope: Scope, *, splits: bool = True) -> None:
        self.scope, self.splits = scope, splits
        self.done: list[str] = []
        self.current: str | None = None
        self.result = Expansion()

    def end(self) -> Expansion:
        self.result.fields = [*self.done, *([self.current] if self.current is not None else [])]
        return self.result

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text
        if len(self.current) > _LONGEST:
            raise TooLongError

    def add_node(self, node: Node, *, quoted: bool) -> None:
        """Add a part of a word."""
        kind = node.type
        if kind in _QUOTES:
            self._add_quoted(node)
        elif kind == "raw_string":
            self.add(source_of(node)[1:-1])
        elif kind == "ansi_c_string":
            self.add(codecs.decode(source_of(node)[2:-1].encode(), "unicode_escape", "replace"))
        elif kind == "string_content":
            self.add(_IN_QUOTES.sub(lambda match: "" if match[1] == "\n" else match[1], source_of(node)))
        elif kind in ("simple_expansion", "expansion"):
            self._put_fields(self._expand_parameter(node), quoted=quoted)
        elif kind == "arithmetic_expansion":
            self._add_arithmetic(node)
        elif kind in _SUBSTITUTIONS and (number := _arithmetic_of(node)) is not None:
            self._add_arithmetic(number)
        elif kind in _SUBSTITUTIONS:
            self.current = self.current if not quoted else (self.current or "")
            self._report_unset(source_of(node), is_known=False)
        elif kind in ("concatenation", "command_name", "brace_expression") and node.child_count:
            self._add_parts(node, quoted=quoted)
        else:
            self.add(source_of(node) if quoted else _remove_escapes(source_of(node)))

    def _add_parts(self, node: Node, *, quoted: bool) -> None:
        for part in list_pieces(node):
            if isinstance(part, str):
                self.add(part if quoted else _remove_escapes(part))
            else:
                self.add_node(part, quoted=quoted)

    def _add_quoted(self, node: Node) -> None:
        inner = [part for part in list_pieces(node) if isinstance(part, str) or part.type not in ('"', "$")]
        if len(inner) == 1 and not isinstance(inner[0], str) and _is_all(inner[0]):
            self._put_many(self._expand_parameter(inner[0]))
            return
        self.add("")
        for part in inner:
            if isinstance(part, str):
                self.add(_IN_QUOTES.sub(lambda match: "" if match[1] == "\n" else match[1], part))
            else:
                if blanks := _blanks_before(part):
                    self.add(blanks.replace("\\\n", ""))
                self.add_node(part, quoted=True)

    def _add_arithmetic(self, node: Node) -> None:
        inner = [child for child in node.children if child.is_named]
        number, known = compute_arithmetic(inner[-1], self.scope) if inner else (None, True)
        if number is None:
            self._report_unset(source_of(node), is_known=known)
        else:
            self.add(str(number))
            self.result.is_known = self.result.is_known and known

    def _report_unset(self, name: str, *, is_known: bool) -> None:
        self.result.unset.append(name)
        self.result.is_known = self.result.is_known and is_known

    def _put_fields(self, value: list[str], *, quoted: bool) -> None:
        text = " ".join(value)
        if quoted or not self.splits:
            self.add(text)
            return
        parts = text.split()
        if text[:1].isspace() and self.current is not None:
            self._close_field()
        if parts:
            self.add(parts[0])
            self._add_fields(parts[1:])
        if parts and text[-1].isspace():
            self._close_field()

    def _put_many(self, values: list[str]) -> None:
        if values:
            self.add(values[0])
            self._add_fields(values[1:])

    def _add_fields(self, values: list[str]) -> None:
        for value in values:
            self._close_field()
            self.add(value)

    def _close_field(self) -> None:
        if self.current is not None:
            self.done.append(self.current)
        self.current = None

    def _variable_value(self, name: str) -> tuple[list[str], bool]:
        """Return the value of a name, and whether it is set."""
        arguments = self.scope.arguments
        if name in ("@", "*"):
            return list(arguments or ()), True
        if name == "#":
            self.result.is_known = self.result.is_known and arguments is not None
            return [str(len(arguments or ()))], True
        if name.isdigit():
            at = int(name) - 1
            self.result.is_known = self.result.is_known and (arguments is not None or at < 0)
            return ([arguments[at]], True) if arguments is not None and 0 <= at < len(arguments) else ([], False)
        if name in self.scope.unsure:
            self._report_unset(f"{name} (line {self.scope.unsure[name]})", is_known=False)
        value = self.scope.variables.get(name)
        if value is None:
            return [], name in self.scope.unsure
        return ([value] if isinstance(value, str) else list(value)), True

    def _read_variable(self, name: str) -> list[str]:
        value, there = self._variable_value(name)
        if not there:
            self._report_unset(name, is_known=bool(_PLAIN.fullmatch(name)))
        return value

    def _expand_parameter(self, node: Node) -> list[str]:
        """Return the value of `$name` or `${name...}`."""
        if node.type == "simple_expansion":
            return self._read_variable(source_of(node).removeprefix(_blanks_before(node))[1:])
        parts = [part for part in list_pieces(node) if isinstance(part, str) or part.type not in ("${", "}")]
        lead = ""
        if parts and not isinstance(parts[0], str) and parts[0].type in ("#", "!"):
            first = parts.pop(0)
            lead = first.type if not isinstance(first, str) else ""
        name, index = self._variable_name(parts[0]) if parts and not isinstance(parts[0], str) else ("", None)
        if not name and lead == "#":
            return self._read_variable("#")
        if not name or lead == "!":
            self._report_unset(source_of(node), is_known=False)
            return []
        rest = parts[1:]
        sign = "" if not rest or isinstance(rest[0], str) else rest[0].type
        if sign in _DEFAULTS:
            return self._with_default(name, sign, rest[1:])
        value = self._read_variable(name)
        if index is not None and index.lstrip("-").isdigit():
            at = int(index)
            value = value[at:][:1]
        if sign == ":" and index in ("@", "*"):
            return _slice_items(value, self._expand_inner(rest[1:]))
        if lead == "#":
            return [str(len(value) if index is not None else len("".join(value)))]
        return [self._edit_value(item, sign, rest[1:]) for item in value] if sign else value

    def _variable_name(self, node: Node) -> tuple[str, str | None]:
        if node.type != "subscript":
            return source_of(node), None
        index = node.child_by_field_name("index")
        name = node.child_by_field_name("name")
        return source_of(name) if name is not None else "", expand_text(index, self.scope).text

    def _with_default(self, name: str, sign: str, rest: Sequence[Node | str]) -> list[str]:
        known = self.result.is_known
        count = len(self.result.unset)
        value, there = self._variable_value(name)
        there = there and (bool("".join(value)) or not sign.startswith(":"))
        if name.isdigit():  # the script has no such argument, so the default is certain
            self.result.is_known = known
        if sign[-1] == "+":
            return [self._expand_inner(rest)] if there else []
        if there or sign[-1] == "?":
            if not there:
                self._report_unset(name, is_known=True)
            return value
        if name not in self.scope.unsure:
            del self.result.unset[count:]
        text = self._expand_inner(rest)
        if sign[-1] == "=":
            self.scope.variables[name] = text
        return [text]

    def _expand_inner(self, parts: Sequence[Node | str]) -> str:
        word = _Word(self.scope, splits=False)
        for part in parts:
            if isinstance(part, str):
                word.add(part)
            else:
                word.add_node(part, quoted=False)
        found = word.end()
        self.result.unset += found.unset
        self.result.is_known = self.result.is_known and found.is_known
        return found.text

    def _edit_value(self, text: str, sign: str, rest: Sequence[Node | str]) -> str:
        """Apply `${name<sign>...}` to a value: replacement, removal at an end, substring, case."""
        if sign in _REPLACING:
            at = next((i for i, part in enumerate(rest) if not isinstance(part, str) and part.type == "/"), len(rest))
            old, new = self._expand_inner(rest[:at]), self._expand_inner(rest[at + 1 :])
            return text.replace(old, new, -1 if sign == "//" else 1) if old else text
        pattern = self._expand_inner(rest)
        if sign in _REMOVING:
            return _without_end(text, sign, pattern)
        if sign == ":":
            return _slice_text(text, pattern)
        cases = {",,": str.lower, "^^": str.upper, ",": lambda t: t[:1].lower() + t[1:], "^": str.capitalize}
        return cases[sign](text) if sign in cases else text


def _arithmetic_of(node: Node) -> Node | None:
    """Return arithmetic after `:-`, which the grammar parses as a command substitution, or None for a real substitution."""
    text = source_of(node).removeprefix(_blanks_before(node))
    if not (text.startswith("$((") and text.endswith("))")):
        return None
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    root = Parser(Language(tree_sitter_bash.language())).parse(f"x={text}".encode()).root_node
    value = root.children[0].child_by_field_name("value") if root.children else None
    return value if value is not None and value.type == "arithmetic_expansion" and not root.has_error else None


def _is_all(node: Node) -> bool:
    """Return whether a node is `$@` or `${name[@]}`, whose items stay separate in quotes."""
    return source_of(node) in ("$@", "${@}") or re.fullmatch(r"\$\{\w+\[@\]\}", source_of(node)) is not None


def _remove_escapes(text: str) -> str:
    return _ESCAPED.sub(lambda match: "" if match[1] == "\n" else match[1], text)


def _without_end(text: str, sign: str, pattern: str) -> str:
    """Remove the shortest or longest prefix or suffix that matches a pattern."""
    shortest_first = range(len(text) + 1) if sign in ("#", "%%") else range(len(text), -1, -1)
    if sign.startswith("#"):
        return next((text[cut:] for cut in shortest_first if fnmatch.fnmatchcase(text[:cut], pattern)), text)
    return next((text[:cut] for cut in shortest_first if fnmatch.fnmatchcase(text[cut:], pattern)), text)


def _slice_text(text: str, numbers: str) -> str:
    """Return `${name:start:length}`."""
    return "".join(_slice_items(list(text), numbers))


def _slice_items(items: list[str], numbers: str) -> list[str]:
    """Return the items of `start:length`."""
    start, _, length = (part.strip() for part in numbers.partition(":"))
    try:
        rest = items[int(start or 0) :]
        return rest[: int(length)] if length else rest
    except ValueError:
        return items


def compute_arithmetic(node: Node, scope: Scope) -> tuple[int | None, bool]:
    """Return the value of an arithmetic expression, or None, and whether a real shell computes the same value."""
    kind = node.type
    if kind == "binary_expression":
        return _compute_pair(node, scope)
    if kind in ("parenthesized_expression", "ternary_expression"):
        inner = [child for child in node.children if child.is_named]
        if kind == "parenthesized_expression":
            return compute_arithmetic(inner[0], scope) if inner else (None, True)
        condition, known = compute_arithmetic(inner[0], scope)
        if condition is None or len(inner) != 3:
            return None, known
        number, same = compute_arithmetic(inner[1 if condition else 2], scope)
        return number, known and same
    if kind == "unary_expression":
        number, known = compute_arithmetic(node.children[-1], scope)
        signs: Mapping[str, Callable[[int], int]] = {"-": operator.neg, "+": operator.pos, "!": lambda n: int(not n)}
        sign = source_of(node.children[0])
        return (signs[sign](number) if number is not None and sign in signs else None), known
    return _compute_word(node, scope)


def _compute_word(node: Node, scope: Scope) -> tuple[int | None, bool]:
    name = source_of(node).strip()
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        value = scope.variables.get(name)
        text, known = (value if isinstance(value, str) else "".join(value or [])), name not in scope.unsure
    else:
        found = expand_text(node, scope)
        text, known = found.text.strip(), found.is_known
    return (int(text) if NUMBER.fullmatch(text) else None), known


def _compute_pair(node: Node, scope: Scope) -> tuple[int | None, bool]:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    sign = node.child_by_field_name("operator")
    if left is None or right is None or sign is None:
        return None, False
    (a, known), (b, same) = compute_arithmetic(left, scope), compute_arithmetic(right, scope)
    known = known and same
    name = source_of(sign)
    if a is None or b is None or name not in OPERATIONS or (name in "/%" and b == 0):
        return None, known
    found = int(OPERATIONS[name](a, b))
    return (found if abs(found) <= _LARGEST else None), known
