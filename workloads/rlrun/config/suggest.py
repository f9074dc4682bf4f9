"""Did-you-mean for every name that a user can mistype."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` for the closest known name, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name of some kind: what was given, the closest name, and all names."""
    names = sorted(known)
    listed = ", ".join(names) if names else "none"
    return f"unknown {kind} {name!r}{did_you_mean(name, names)}; known: {listed}"
