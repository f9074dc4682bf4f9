"""Shell conditions `[ ... ]`, `[[ ... ]]`, `(( ... ))` and `test`, evaluated on the syntax tree."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from rlrun.convert.readers.shell_expand import NUMBER, OPERATIONS, Scope, compute_arithmetic, expand_text, source_of

if TYPE_CHECKING:
    from tree_sitter import Node

_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-gt": ">", "-le": "<=", "-ge": ">="}
_CONDITIONS = ("unary_expression", "binary_expression", "negation_expression", "parenthesized_expression")


def evaluate_test(node: Node, scope: Scope) -> bool | None:
    """Return the truth of `[ ... ]`, `[[ ... ]]` or `(( ... ))`, or None if it depends on files or unknown values."""
    inner = [child for child in node.children if child.is_named]
    if not inner:
        return None
    if source_of(node).startswith("(("):
        number, known = compute_arithmetic(inner[0], scope)
        return bool(number) if known and number is not None else None
    return _read_truth(inner[0], scope) if len(inner) == 1 else None


def test_words(words: list[str]) -> bool | None:
    """Return the truth of `test WORD...`, or None if unknown."""
    match words:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, comparison, right]:
            return _compare_values(left, comparison, right)
    return None


def _read_truth(node: Node, scope: Scope) -> bool | None:
    kind = node.type
    if kind not in _CONDITIONS:
        found = expand_text(node, scope)
        return bool(found.text) if found.is_known else None
    named = [child for child in node.children if child.is_named]
    if kind == "parenthesized_expression":
        return _read_truth(named[0], scope) if len(named) == 1 else None
    if kind == "binary_expression":
        return _truth_of_pair(node, scope)
    sign = source_of(node.children[0])
    if sign == "!":
        inner = _read_truth(node.children[-1], scope)
        return None if inner is None else not inner
    if sign not in ("-z", "-n"):
        return None  # tests of files have no known result
    found = expand_text(node.children[-1], scope)
    return bool(found.text) is (sign == "-n") if found.is_known else None


def _truth_of_pair(node: Node, scope: Scope) -> bool | None:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    sign = next((source_of(child) for child in node.children if child not in (left, right)), "")
    if left is None:
        return None
    if sign in ("&&", "||", "-a", "-o"):
        a = _read_truth(left, scope)
        b = _read_truth(right, scope) if right is not None else None
        decisive = sign in ("||", "-o")
        if a is decisive or b is decisive:
            return decisive
        return None if a is None or b is None else not decisive
    a_text = expand_text(left, scope)
    b_text = expand_text(right, scope)
    return _compare_values(a_text.text, sign, b_text.text) if a_text.is_known and b_text.is_known else None


def _compare_values(left: str, comparison: str, right: str) -> bool | None:
    if comparison in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if comparison == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if comparison in _COMPARISONS and NUMBER.fullmatch(left) and NUMBER.fullmatch(right):
        return bool(OPERATIONS[_COMPARISONS[comparison]](int(left), int(right)))
    return None
