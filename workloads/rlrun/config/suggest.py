"""Did-you-mean for every name that a user can mistype."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The closest known name, whatever the letters' case and the signs between words; None when none is close."""
    names = list(known)
    plain = {plain_name(one): one for one in reversed(names)}
    if (same := plain.get(plain_name(name))) is not None:
        return same
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:  # letters in another order are the most frequent slip
        return next((one for one in close if sorted(one) == sorted(name)), close[0])
    lower = difflib.get_close_matches(plain_name(name), list(plain), n=1, cutoff=0.6)
    return plain[lower[0]] if lower else None


def plain_name(name: str) -> str:
    """A name without case and the signs between its words."""
    return re.sub(r"[-_ .]", "", name).casefold()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` for the closest known name, or an empty string when none is close."""
    close = close_name(name, known)
    return f" (did you mean {close}?)" if close is not None else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name of some kind: what was given, the closest name, and all names."""
    names = sorted(known)
    listed = ", ".join(names) if names else "none"
    return f"unknown {kind} {name!r}{did_you_mean(name, names)}; known: {listed}"
