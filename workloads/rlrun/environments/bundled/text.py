"""Comparison of a short answer with the right one."""

from __future__ import annotations


def position_score(text: str, answer: str) -> float:
    """The share of positions that are right, in [0, 1]: `#{i: text[i] == answer[i]} / max(len(text), len(answer))`.

    Surrounding white space does not count. A missing and a surplus character are both a wrong position, so that going
    on after a right answer never pays: "dcba" for "dcba" is 1, "dc" is 1/2, "dcbadcba" is 1/2, "" is 0.
    """
    text = text.strip()
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))
