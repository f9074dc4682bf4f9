"""Choice of the engines that receive a version together. Pure; times are passed in.

A round is one version for the engines that ask for it while it is open. It closes as soon as all engines are there that are expected, or
when it has been open for a while: who comes later gets a round of its own. Engines whose transfer failed are alone in theirs until one
succeeds, so that the one that broke it cannot break it for the others again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW_SECONDS = 1.0
"""Longest wait of a round for engines that took the version before; one that comes later is sent the version by itself."""


@dataclass(eq=False)
class Round:
    """One version for some engines."""

    version: int
    opened: float
    members: dict[str, str | None] = field(default_factory=dict)
    """Engines, with the session that each is in."""
    bases: dict[str, int | None] = field(default_factory=dict)
    """Checksum of the version that each has in its shared memory."""
    closed: bool = False


class Rounds:
    """The open rounds, and what is known of the engines.

    Args:
        window: longest time that a round is open, in seconds.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._latest: dict[str, int] = {}
        """The version of each engine's last round."""
        self._alone: set[str] = set()
        self._open: dict[int, Round] = {}

    def enter(
        self, version: int, engine: str, session: str | None, *, alone: bool, now: float, base: int | None = None
    ) -> Round:
        """Let an engine into the round of a version; the round of an engine that is alone is closed already."""
        if alone:
            self._alone.add(engine)
        if engine in self._alone:
            return Round(version, now, {engine: session}, {engine: base}, closed=True)
        found = self._open.setdefault(version, Round(version, now))
        found.members[engine], found.bases[engine] = session, base
        if not self._missing(found):
            self._close(found)
        return found

    def left(self, one: Round, now: float) -> float:
        """Seconds until the round closes by itself; it is closed when none are left."""
        remaining = one.opened + self._window - now
        if not one.closed and remaining <= 0:
            self._close(one)
        return 0.0 if one.closed else remaining

    def succeeded(self, version: int, engines: Iterable[str]) -> None:
        """The engines have received a version: they may share a round again."""
        self._alone -= set(engines)
        self._latest |= dict.fromkeys(engines, version)

    def failed(self, engines: Iterable[str]) -> None:
        """A transfer to the engines broke."""
        self._alone |= set(engines)

    def _missing(self, one: Round) -> set[str]:
        """Engines that the round waits for: those that took an older version last."""
        behind = {engine for engine, version in self._latest.items() if version < one.version}
        return behind - self._alone - one.members.keys()

    def _close(self, one: Round) -> None:
        one.closed = True
        del self._open[one.version]
        for engine in self._missing(one):  # it is gone, or late; should it ask again it is known again
            del self._latest[engine]
        self._latest |= dict.fromkeys(one.members, one.version)
