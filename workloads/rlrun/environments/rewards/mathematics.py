"""Whether a reply's final answer is the right one, as expressions and not as text: "1/2", "0.5" and "\\frac{1}{2}" are the same.

The package `math-verify` does the work. It computes with sympy, which some inputs keep busy for ever: call it through
`bounded.BoundedCalls`.
"""

from __future__ import annotations


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

    gold = parse(f"\\boxed{{{truth}}}") or parse(truth)
    if not gold:
        raise ValueError(f"the right answer {truth!r} is no mathematical expression")
    return float(verify(gold, parse(reply)))
