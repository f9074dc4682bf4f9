"""Comparison of a reply's final answer with the right one as expressions: "1/2", "0.5" and "\\frac{1}{2}" are the same.

The package `math-verify` does the work. It computes with sympy, which some inputs keep busy for ever: call it through
`bounded.BoundedCalls`.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from functools import partial

from rlrun.environments.layouts import boxed_content, has_box

_SCIENTIFIC = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d+)\s*")
"""A number as programs print it, such as `1e-05`: math-verify reads its `e` as Euler's number."""
_MAX_DECIMALS = 50
"""Digits before or after the point up to which such a number is written out."""
_MAX_SHOWN = 60


OWN_FUNCTION = "or set reward to a function of yours, which gets ground_truth as it is"


class TruthError(ValueError):
    """A ground truth that a reward cannot compare with.

    Args:
        truth: value of the column `ground_truth`.
        fix: what the reward needs, and how the row or the reward is changed; the same for all such rows.
    """

    def __init__(self, truth: object, fix: str) -> None:
        shown = json.dumps(truth, default=str)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
        super().__init__(f"ground_truth is {shown}, and {fix}")
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
    """1 if the last answer in a reply equals `truth`, else 0.

    A reply with a `\\boxed{}` is compared by the last one only; math-verify would take neighboring boxes for one set. A last box that is
    not closed is no answer. A reply that the parsers refuse (nested too deeply, a number with too many digits) is worth 0.

    Args:
        reply: text in which an answer is found in `\\boxed{}`, in LaTeX or as a plain expression.
        truth: the right answer, an expression in LaTeX or plain.

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
        raise ValueError(f"the right answer {truth!r} is no mathematical expression")
    return gold


def _parse_answer(text: str) -> list[object]:
    from math_verify import parse

    # Without its own time-outs, which would make a wrong answer of one that takes long.
    found: list[object] = partial(parse, parsing_timeout=None)(text)
    return found


def _written_out(text: str) -> str:
    """A number with an exponent as a decimal number, or as a product with a power of ten; any other text as it is."""
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return text
    if len(match[2].lstrip("+-0")) <= 2 and abs(int(match[2])) <= _MAX_DECIMALS:
        return format(Decimal(text.strip()), "f")
    return f"{match[1]} \\times 10^{{{match[2]}}}"


def prepare_parsers() -> None:
    """Import what `math_score` needs and build its parsers, which takes seconds."""
    math_score("\\boxed{1}", "2")


def can_parse(truth: str) -> bool:
    """True: the parsers finish on a right answer. For `bounded.BoundedCalls`, whose deadline is the other answer."""
    parse_truth(truth)
    return True
