"""Evaluation of arithmetic that a model wrote, without executing it as code.

The text is parsed into Python's syntax tree. Only numbers, `+ - * / // % **`, signs and parentheses are evaluated; other nodes (names,
calls, attributes, texts) and expensive or large results are errors.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

MAX_CHARS = 200
MAX_BITS = 256
"""Largest size of an integer in bits, for literals and results: about 77 digits."""

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class ExpressionError(ValueError):
    """Error for an invalid expression. The message is a reason that can be shown to a model."""


def evaluate_text(text: str) -> str:
    """Return the value of an expression as text: "2*(3+4)" -> "14", "1/4" -> "0.25", "6/3" -> "2".

    Integers are exact; other numbers have ten significant digits. Raises `ExpressionError`.
    """
    text = text.strip()
    if not text:
        raise ExpressionError("empty expression")
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    if not text.isascii() or not text.isprintable():
        raise ExpressionError("not plain text")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None
    return _format_number(_node_value(tree.body))


def _node_value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bound_number(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _node_value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_node_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _apply_operator(type(op), _node_value(left), _node_value(right))
    raise ExpressionError("only numbers, + - * / // % ** and parentheses")


def _apply_operator(op: type[ast.operator], left: Number, right: Number) -> Number:
    # Powers are checked before the computation, which could be huge; the size of the result follows from the operands.
    if op is ast.Pow and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 2 * MAX_BITS:
        raise ExpressionError("number too large")
    try:
        result = _OPERATORS[op](left, right)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("number too large") from None
    if isinstance(result, complex):
        raise ExpressionError("not a real number")
    return _bound_number(result)


def _bound_number(number: Number) -> Number:
    if not math.isfinite(number) if isinstance(number, float) else number.bit_length() > MAX_BITS:
        raise ExpressionError("number too large")
    return number


def _format_number(number: Number) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        number = int(number)
    return str(number) if isinstance(number, int) else format(number, ".10g")
