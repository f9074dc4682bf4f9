"""Selection of the engines that receive a version together. Pure functions; the caller passes the time.

A round sends one version to the engines that request it while the round is open. It closes when all expected engines have joined, or
after the window; later engines get their own rounds. An engine whose transfer failed gets its own rounds until a transfer succeeds, so
that it cannot break the transfer of others again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW_SECONDS = 1.0
"""Longest wait of a round for engines that received the previous version; later engines get the version in a separate round."""


@dataclass(eq=False)
class Round:
    """Transfer of one version to several engines."""

    version: int
    opened: float
    members: dict[str, str | None] = field(default_factory=dict)
    """Engines, each with its current session."""
    bases: dict[str, int | None] = field(default_factory=dict)
    """Checksum of the version in each engine's shared memory."""
    closed: bool = False


class Rounds:
    """Open rounds, and state of the engines.

    Args:
        window: longest time that a round is open, in seconds.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._latest: dict[str, int] = {}
        """Version of each engine's last round."""
        self._alone: set[str] = set()
        self._open: dict[int, Round] = {}

    def enter(
        self, version: int, engine: str, session: str | None, *, alone: bool, now: float, base: int | None = None
    ) -> Round:
        """Add an engine to the round of a version. An engine that must be alone gets a new closed round."""
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
        """Return the seconds until the round closes; close it at 0."""
        remaining = one.opened + self._window - now
        if not one.closed and remaining <= 0:
            self._close(one)
        return 0.0 if one.closed else remaining

    def succeeded(self, version: int, engines: Iterable[str]) -> None:
        """Report that the engines have received a version; they may share rounds again."""
        self._alone -= set(engines)
        self._latest |= dict.fromkeys(engines, version)

    def failed(self, engines: Iterable[str]) -> None:
        """Report a failed transfer to the engines; each gets separate rounds."""
        self._alone |= set(engines)

    def _missing(self, one: Round) -> set[str]:
        """Return the engines that the round waits for, because their last version is older."""
        behind = {engine for engine, version in self._latest.items() if version < one.version}
        return behind - self._alone - one.members.keys()

    def _close(self, one: Round) -> None:
        one.closed = True
        del self._open[one.version]
        for engine in self._missing(one):  # the engine has ended or is late; it is added again at its next request
            del self._latest[engine]
        self._latest |= dict.fromkeys(one.members, one.version)
