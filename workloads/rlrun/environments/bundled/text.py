"""Comparison of a short answer with the expected one."""

from __future__ import annotations


def position_score(text: str, answer: str) -> float:
    """Return the share of right positions, in [0, 1]: `#{i: text[i] == answer[i]} / max(len(text), len(answer))`.

    White space around the text is ignored. Missing and additional characters count as wrong positions, so text after the right answer
    reduces the score: for the answer "dcba", "dcba" scores 1, "dc" 1/2, "dcbadcba" 1/2 and "" 0.
    """
    text = text.strip()
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))
