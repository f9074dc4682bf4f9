"""Measures of Python source text: functions, `Any`, docstrings. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
COMPLEX = 21
"""Complexity of grade D of radon."""
PRONOUNS = ("How", "That", "Those", "What", "Where", "Whether", "Which", "Who", "Whoever", "Whom", "Whose")
_BARE = re.compile(rf"(?:{'|'.join((*PRONOUNS, 'Of'))})\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)


@dataclass(frozen=True)
class Measures:
    """Counts of one file or, added up, of many."""

    lines: int = 0
    functions: int = 0
    long_functions: int = 0
    """Functions of more than `MAX_FUNCTION_LINES` lines, from `def` to the last one, docstring included and decorators not."""
    many_parameters: int = 0
    """Functions of more than `MAX_PARAMETERS` parameters, `self` and `cls` not counted."""
    complex_functions: int = 0
    """Functions of a cyclomatic complexity of at least `COMPLEX`."""
    anys: int = 0
    """Uses of `Any`; its imports do not count."""
    docstrings: int = 0
    """Docstrings of modules, classes and functions, and strings below an assignment."""
    bare_docstrings: int = 0
    """Docstrings whose first word is `Of` or one of `PRONOUNS`."""

    def __add__(self, other: Measures) -> Measures:
        return Measures(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def measure(text: str) -> Measures:
    """Measure the text of one module."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    docstrings = list(docstrings_of(tree))
    return Measures(
        lines=text.count("\n"),
        functions=len(functions),
        long_functions=sum(lines_of(function) > MAX_FUNCTION_LINES for function in functions),
        many_parameters=sum(parameters_of(function) > MAX_PARAMETERS for function in functions),
        complex_functions=sum(complexity(function) >= COMPLEX for function in functions),
        anys=sum(_is_any(node) for node in ast.walk(tree)),
        docstrings=len(docstrings),
        bare_docstrings=sum(_BARE.match(docstring.strip()) is not None for docstring in docstrings),
    )


def lines_of(function: Function) -> int:
    """Return the lines from `def` to the end of the body."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters_of(function: Function) -> int:
    """Return the number of parameters, `*args` and `**kwargs` included, without a leading `self` or `cls`."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    bound = bool(positional) and positional[0].arg in ("self", "cls")
    return len(positional) - bound + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def complexity(function: Function) -> int:
    """Return the cyclomatic complexity as radon counts it, but with inner functions counted separately.

    The value is one plus one for each branch, loop, handler, assertion, case, comprehension and condition, `else` of a
    loop or of a `try`, and each operand of `and` and `or` after the first.
    """
    return 1 + sum(_paths(node) for node in _inside(function))


def _paths(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.Try):
        return bool(node.orelse)
    return isinstance(node, _BRANCHES) + (isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and bool(node.orelse))


def _inside(function: Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(node, (*_SCOPES,))]


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_any(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "Any"
    return isinstance(node, ast.Name) and node.id == "Any"


def docstrings_of(tree: ast.AST) -> Iterator[str]:
    """Return all docstrings of a module: its own, those of its classes and functions, and of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, (ast.Module, *_SCOPES))
        for before, statement in zip([None, *body], body, strict=False):
            first = documented and before is None
            if (first or isinstance(before, (ast.Assign, ast.AnnAssign))) and (text := _text(statement)) is not None:
                yield text


def _text(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None
