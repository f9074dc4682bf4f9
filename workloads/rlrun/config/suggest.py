"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def close_name(name: str, known: Iterable[str]) -> str | None:
    """Return the closest known name, ignoring case and the separators of words, or None if no name is close."""
    names = list(known)
    plain = {plain_name(each): each for each in reversed(names)}
    if (same := plain.get(plain_name(name))) is not None:
        return same
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:  # swapped letters are the most frequent typing error
        return next((each for each in close if sorted(each) == sorted(name)), close[0])
    lower = difflib.get_close_matches(plain_name(name), list(plain), n=1, cutoff=0.6)
    return plain[lower[0]] if lower else None


def plain_name(name: str) -> str:
    """Return a name in lower case without the separators of its words."""
    return re.sub(r"[-_ .]", "", name).casefold()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean x?)` for the closest known name, or an empty string if no name is close."""
    close = close_name(name, known)
    return f" (did you mean {close}?)" if close is not None else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: the given name, the closest name, and all names."""
    names = sorted(known)
    listed = ", ".join(names) if names else "none"
    return f"unknown {kind} {name!r}{did_you_mean(name, names)}; known: {listed}"
