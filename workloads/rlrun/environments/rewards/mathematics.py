"""Comparison of a reply's final answer with the right one as expressions: "1/2", "0.5" and "\\frac{1}{2}" are equal.

The package `math-verify` compares them. It uses sympy, which does not finish on some inputs, so call it through `bounded.BoundedCalls`.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from functools import partial

from rlrun.environments.layouts import boxed_content, has_box

_SCIENTIFIC = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d+)\s*")
"""A number in the format of programs, such as `1e-05`. math-verify would read its `e` as Euler's number."""
_MAX_DECIMALS = 50
"""Largest exponent, positive or negative, up to which such a number is written as a decimal."""
_MAX_SHOWN = 60


OWN_FUNCTION = "or set reward to your own function, which gets ground_truth unchanged"


class TruthError(ValueError):
    """Error for a ground truth that a reward cannot compare with.

    Args:
        truth: value of the column `ground_truth`.
        fix: requirement of the reward, and the change of the row or the reward; the same text for all rows with this fault.
    """

    def __init__(self, truth: object, fix: str) -> None:
        shown = json.dumps(truth, default=str)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
        super().__init__(f"ground_truth is {shown}, but {fix}")
        self.fix = fix


def truth_text(truth: object) -> str:
    """Return a row's ground truth as an expression that `math_score` compares with.

    Args:
        truth: value of the column `ground_truth`.

    Raises:
        TruthError: the value is not one expression (null, a truth value, a list, an object, an empty text, NaN, infinity); contains the
            value and the fix.
    """
    if isinstance(truth, str) and truth.strip():
        return truth
    if isinstance(truth, int) and not isinstance(truth, bool):
        return str(truth)
    if isinstance(truth, float) and math.isfinite(truth):
        return repr(truth)
    raise TruthError(
        truth,
        "the reward math compares with one expression: write it as a number or a text "
        f'(a pair as "(1, 2)", a set as "\\\\{{1, 2\\\\}}"), {OWN_FUNCTION}',
    )


def math_score(reply: str, truth: str) -> float:
    """Return 1 if the last answer in a reply equals `truth`, else 0.

    If a reply contains a `\\boxed{}`, only the last one is compared, because math-verify would combine adjacent boxes into one set. A last
    box without its end counts as no answer. A reply that the parsers reject (nested too deeply, a number with too many digits) scores 0.

    Args:
        reply: text with an answer in `\\boxed{}`, in LaTeX or as a plain expression.
        truth: right answer, as an expression in LaTeX or plain.

    Raises:
        ModuleNotFoundError: `math-verify` is not installed.
        ValueError: `truth` is not an expression.
    """
    answer = boxed_content(reply)
    if answer is None and has_box(reply):
        return 0.0
    if answer is not None and "".join(answer.split()) == "".join(truth.split()):
        return 1.0
    gold = parse_truth(truth)
    try:
        from math_verify import verify

        found = _parse_answer(_written_out(reply) if answer is None else f"\\boxed{{{_written_out(answer)}}}")
        return float(verify(gold, found, timeout_seconds=None))
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
        return 0.0


def parse_truth(truth: str) -> list[object]:
    """Parse a right answer.

    Raises:
        ModuleNotFoundError: `math-verify` is not installed.
        ValueError: `truth` is not an expression.
    """
    written = _written_out(truth)
    try:
        gold = _parse_answer(f"\\boxed{{{written}}}") or _parse_answer(written)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(f"the right answer {truth!r} cannot be parsed: {type(error).__name__}: {error}") from error
    if not gold:
        raise ValueError(f"the right answer {truth!r} is not a mathematical expression")
    return gold


def _parse_answer(text: str) -> list[object]:
    from math_verify import parse

    # math-verify's own time limit is off: it would turn a slow answer into a wrong one.
    found: list[object] = partial(parse, parsing_timeout=None)(text)
    return found


def _written_out(text: str) -> str:
    """Return a number with an exponent as a decimal or as a product with a power of ten, and any other text unchanged."""
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return text
    if len(match[2].lstrip("+-0")) <= 2 and abs(int(match[2])) <= _MAX_DECIMALS:
        return format(Decimal(text.strip()), "f")
    return f"{match[1]} \\times 10^{{{match[2]}}}"


def prepare_parsers() -> None:
    """Import the dependencies of `math_score` and build its parsers, which takes seconds."""
    math_score("\\boxed{1}", "2")


def can_parse(truth: str) -> bool:
    """Return True after the parsers have parsed a right answer. Called through `bounded.BoundedCalls`, whose deadline is the other case."""
    parse_truth(truth)
    return True
