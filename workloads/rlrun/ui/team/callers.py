"""Users of a team's page: their identity (TokenReview), their rights (SubjectAccessReview), and their sessions.

Reviews are cached for a limited time, and the rate of refused tokens is limited. The token of a browser's session stays in the memory of
this process, and the browser stores only a random cookie.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Generic, TypeVar

from rlrun.runtime.json_types import Json
from rlrun.ui.team.cluster_api import Api, RefusedError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """Values by key, each with its own lifetime.

    Args:
        most: maximum number of values; the oldest are dropped.
        clock: monotonic clock in seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, or None if there is none or it has expired."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            if found[0] <= self._clock():
                del self._values[key]
                return None
            return found[1]

    def put(self, key: Key, value: Value, seconds: float) -> None:
        """Store a value for `seconds`."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = (self._clock() + seconds, value)
            while len(self._values) > self._most:
                self._values.popitem(last=False)

    def drop(self, key: Key) -> None:
        """Remove the value of a key."""
        with self._lock:
            self._values.pop(key, None)


class Limit:
    """Limit for the rate of failures of a peer: `burst` failures at once, then one more after each `seconds`.

    Args:
        burst: number of failures at once.
        seconds: time after which one more failure is allowed.
        clock: monotonic clock in seconds.
        peers: maximum number of stored peers; the one with the oldest failure is dropped.
    """

    def __init__(self, burst: int, seconds: float, clock: Callable[[], float], peers: int = 4096) -> None:
        self._burst, self._seconds, self._clock, self._peers = burst, seconds, clock, peers
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """Time at which each peer has its full burst again."""
        self._lock = Lock()

    def seconds_left(self, peer: str) -> float:
        """Return the seconds until this peer may fail again; 0: now."""
        with self._lock:
            # Each failure counts for `seconds`. One more is allowed while at most `burst - 1` of them count.
            left = self._full_at.get(peer, 0.0) - self._clock()
            return max(0.0, left - (self._burst - 1) * self._seconds)

    def has_failed(self, peer: str) -> bool:
        """Return whether failures of a peer still count."""
        with self._lock:
            return self._full_at.get(peer, 0.0) > self._clock()

    def count_failure(self, peer: str) -> None:
        """Count a failure of a peer."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._full_at.pop(peer, now))
            self._full_at[peer] = begin + self._seconds
            while len(self._full_at) > self._peers:
                self._full_at.popitem(last=False)


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

    def find_token(self, cookie: str) -> str | None:
        """Return the token of a session, or None if it has ended."""
        return self._tokens.get(_token_digest(cookie))

    def close(self, cookie: str) -> None:
        """End a session."""
        self._tokens.drop(_token_digest(cookie))


def _token_digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode(errors="surrogateescape")).digest()


KEPT_SECONDS_MAX = 60.0
"""Maximum time for which a response of the API server about a user is cached."""
_REFUSED_SECONDS = 10.0
"""Time for which the refusal of a token is cached."""
_COUNTED_SECONDS = 600.0
"""Time for which a repeated refused token does not count as a new guess."""
_TOKEN_MAX = 16 * 1024
_NEW_AT_ONCE, _NEW_WAIT_SECONDS = 4, 2.0
"""Maximum number of concurrent reviews while the limit of all peers is used up, for peers without refused tokens and for repeated refused
tokens; and maximum wait for such a review."""
_AT_ONCE = 16
"""Concurrent reviews for one list."""
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
GROUP = "rlrun.io"
FILES = "files"
"""Subresource that represents the files of a run: `get rlruns/files`. No server implements it; only roles refer to it."""


class SignedOutError(Exception):
    """Error for a request without a valid user; the message is one sentence for people."""


class TooManyError(Exception):
    """Error after too many refused tokens.

    Args:
        seconds: time until another token is reviewed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many tokens were refused; try again in {max(1, round(seconds))} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Caller:
    """User as the API server identifies it."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Callers:
    """Users by their tokens. Only keyed digests of tokens are stored.

    Args:
        api: client for token reviews.
        audiences: accepted audiences of tokens; empty: the audience of the API server.
        seconds: time for which a review is cached, at most 60.
        clock: monotonic clock in seconds.
        epoch: clock in seconds since the epoch.
    """

    def __init__(
        self,
        api: Api,
        audiences: Sequence[str] = (),
        seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._audiences = api, tuple(audiences)
        self._seconds, self._epoch = min(seconds, KEPT_SECONDS_MAX), epoch
        self._key = secrets.token_bytes(32)
        self._kept: Kept[bytes, Caller | str] = Kept(4096, clock)
        self._good: Kept[bytes, bool] = Kept(4096, clock)
        """Tokens that were valid before: reviewing them again is not a guess."""
        self._counted: Kept[bytes, bool] = Kept(4096, clock)
        """Refused tokens that were counted as guesses. A browser that repeats an expired token has another limit (`_again`)."""
        self._limits = (Limit(10, 6.0, clock), Limit(100, 0.6, clock))
        """Limits per peer (10 at once, then one per 6 s), and for all peers with refused tokens together (100, then one per 0.6 s)."""
        self._again = Limit(2, 30.0, clock)
        """Limit per counted token."""
        self._new = BoundedSemaphore(_NEW_AT_ONCE)

    @property
    def audience_hint(self) -> str:
        """Part of the login message about the required audience; empty for the API server's audience."""
        return f", with the audience {' or '.join(self._audiences)}" if self._audiences else ""

    def identify_user(self, token: str, peer: str) -> Caller:
        """Return the user of a token.

        Args:
            token: bearer token.
            peer: address of the sender.

        Raises:
            SignedOutError: the token is not valid.
            TooManyError: too many tokens of this peer, or of all peers, were refused recently; the token was not reviewed.
            ClusterError: the API server did not review the token.
        """
        key = hmac.digest(self._key, token.encode(errors="surrogateescape"), "sha256")
        found = self._kept.get(key)
        if found is None:
            found = self._review_within_limits(token, key, peer)
        if isinstance(found, str):
            raise SignedOutError(found)
        return found

    def _review_within_limits(self, token: str, key: bytes, peer: str) -> Caller | str:
        # known: the token was valid before. counted: its refusal was counted as a guess. new: the peer has no refused tokens.
        known, counted = self._good.get(key) is not None, self._counted.get(key) is not None
        limits = [(self._again, key.hex())] if counted else [(self._limits[0], peer), (self._limits[1], "")]
        # The limit of all peers applies only to peers with refused tokens, so that guesses from many addresses do not lock out new users.
        new = not counted and not self._limits[0].has_failed(peer)
        if not known and not new and (left := max(limit.seconds_left(name) for limit, name in limits)) > 0:
            raise TooManyError(left)
        found = (
            self._request_review(token) if known or not self._limits[1].seconds_left("") else self._review_new(token)
        )
        if isinstance(found, str):
            self._good.drop(key)
            if not known:
                for limit, name in limits:
                    limit.count_failure(name)
                if not counted:
                    self._counted.put(key, True, _COUNTED_SECONDS)
            self._kept.put(key, found, _REFUSED_SECONDS)
        else:
            self._counted.drop(key)
            self._good.put(key, True, 3600.0)
            self._kept.put(key, found, min(self._seconds, _seconds_left(token, self._epoch())))
        return found

    def _review_new(self, token: str) -> Caller | str:
        """Review the token of a new peer, or a counted token, while many peers guess; only a few run at once, to protect the API server."""
        if not self._new.acquire(timeout=_NEW_WAIT_SECONDS):
            raise TooManyError(_NEW_WAIT_SECONDS)
        try:
            return self._request_review(token)
        finally:
            self._new.release()

    def _request_review(self, token: str) -> Caller | str:
        if not token or len(token) > _TOKEN_MAX or not (token.isascii() and token.isprintable()) or " " in token:
            return "this is not a token: a token is one line of letters without spaces"
        spec: dict[str, object] = {"token": token}
        if self._audiences:
            spec["audiences"] = list(self._audiences)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            status = _review_status(self._api.post(TOKEN_REVIEWS, body))
        except RefusedError as error:
            told = "the service account of this page lacks the right to create tokenreviews"
            raise RefusedError(error.status, f"{told}: {error}", told) from None
        if status.get("authenticated") is not True:
            return "the cluster refused this token: it has expired, is incomplete, or belongs to another cluster"
        meant = status.get("audiences")
        if self._audiences and not (isinstance(meant, list) and set(meant) & set(self._audiences)):
            return f"this token has another audience; it must have the audience {' or '.join(self._audiences)}"
        return _read_caller(status.get("user"))


def _review_status(review: Json) -> Json:
    found = review.get("status")
    return found if isinstance(found, dict) else {}


def _read_caller(user: object) -> Caller | str:
    found = user if isinstance(user, dict) else {}
    name = found.get("username")
    if not isinstance(name, str) or not name:
        return "the cluster returned no user for this token"
    extra = found.get("extra") or {}
    return Caller(
        name,
        str(found.get("uid") or ""),
        tuple(str(one) for one in found.get("groups") or ()),
        tuple((str(key), tuple(str(one) for one in values)) for key, values in sorted(extra.items())),
    )


def _seconds_left(token: str, now: float) -> float:
    """Return the seconds until a JWT expires by its own claim, infinity without one. The claim is unverified, but can only shorten."""
    try:
        part = token.split(".")[1]
        until = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))["exp"]
        return max(0.0, float(until) - now)
    except (LookupError, TypeError, ValueError, OverflowError, binascii.Error, RecursionError):
        return float("inf")


class Rights:
    """Rights of users according to the API server, with one review per run.

    Args:
        api: client for access reviews.
        seconds: time for which a review is cached, at most 60.
        clock: monotonic clock in seconds.
    """

    def __init__(self, api: Api, seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._seconds = api, min(seconds, KEPT_SECONDS_MAX)
        self._kept: Kept[tuple[Caller, str, str, str], bool] = Kept(100_000, clock)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rights")

    def may_get_run(self, caller: Caller, namespace: str, name: str, subresource: str = "") -> bool:
        """Return whether a user may get a run, or a subresource of it.

        Raises:
            ClusterError: the API server did not review the access.
        """
        key = (caller, namespace, name, subresource)
        found = self._kept.get(key)
        if found is None:
            found = self._request_review(caller, namespace, name, subresource)
            self._kept.put(key, found, self._seconds)
        return found

    def allowed_runs(self, caller: Caller, runs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return the runs (namespace, name) among the given ones that a user may get.

        Raises:
            ClusterError: the API server did not review the access.
        """
        asked = list(runs)
        known = [self._kept.get((caller, *run, "")) for run in asked]
        new = [run for run, one in zip(asked, known, strict=True) if one is None]
        fresh = dict(zip(new, self._pool.map(lambda run: self.may_get_run(caller, *run), new), strict=True))
        return {run for run, one in zip(asked, known, strict=True) if (fresh[run] if one is None else one)}

    def _request_review(self, caller: Caller, namespace: str, name: str, subresource: str) -> bool:
        wanted = {"verb": "get", "group": GROUP, "resource": "rlruns", "namespace": namespace, "name": name}
        if subresource:
            wanted["subresource"] = subresource
        spec: dict[str, object] = {"user": caller.name, "groups": list(caller.groups), "resourceAttributes": wanted}
        if caller.uid:
            spec["uid"] = caller.uid
        if caller.extra:
            spec["extra"] = {key: list(values) for key, values in caller.extra}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        try:
            status = _review_status(self._api.post(ACCESS_REVIEWS, body))
        except RefusedError as error:
            told = "the service account of this page lacks the right to create subjectaccessreviews"
            raise RefusedError(error.status, f"{told}: {error}", told) from None
        return status.get("allowed") is True and status.get("denied") is not True
