"""Comparison of a reply's final answer with the right one as expressions: "1/2", "0.5" and "\\frac{1}{2}" are the same.

The package `math-verify` does the work. It computes with sympy, which some inputs keep busy for ever: call it through
`bounded.BoundedCalls`.
"""

from __future__ import annotations

from functools import partial


def math_score(reply: str, truth: str) -> float:
    """1 if the last answer in a reply equals `truth`, else 0.

    Args:
        reply: text in which an answer is found in `\\boxed{}`, in LaTeX or as a plain expression.
        truth: the right answer, an expression in LaTeX or plain.

    Raises:
        ModuleNotFoundError: `math-verify` is not installed.
        ValueError: `truth` is no expression.
    """
    from math_verify import parse, verify

    # Without its own time-outs, which would make a wrong answer of one that takes long.
    parsed = partial(parse, parsing_timeout=None)
    gold = parsed(f"\\boxed{{{truth}}}") or parsed(truth)
    if not gold:
        raise ValueError(f"the right answer {truth!r} is no mathematical expression")
    return float(verify(gold, parsed(reply), timeout_seconds=None))


def prepare() -> None:
    """Import what `math_score` needs and build its parsers, which takes seconds."""
    math_score("\\boxed{1}", "1")
