"""Sessions of browsers: the token stays in the memory of this process, and the browser stores only a random cookie."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from rlrun.ui.team.kept import Kept

SESSION_SECONDS = 12 * 3600.0
_SESSIONS_MAX = 2048


class Sessions:
    """Tokens by the cookies of browsers. Only digests of cookies are stored.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens: Kept[bytes, str] = Kept(_SESSIONS_MAX, clock)

    def open(self, token: str) -> str:
        """Start a session and return the cookie's value."""
        cookie = secrets.token_urlsafe(32)
        self._tokens.put(_token_digest(cookie), token, SESSION_SECONDS)
        return cookie

    def token(self, cookie: str) -> str | None:
        """Return the token of a session, or None if it has ended."""
        return self._tokens.get(_token_digest(cookie))

    def close(self, cookie: str) -> None:
        """End a session."""
        self._tokens.drop(_token_digest(cookie))


def _token_digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode(errors="surrogateescape")).digest()
