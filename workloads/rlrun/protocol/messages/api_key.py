"""Keys in the headers of requests: the run's own key, and those of its guests.

A guest (`trainer.sharedWith`) has its own key, like any run. When it joins, the trainer confirms the digest of that key with a proof that
requires the host's key. Trainer and engines can then identify a guest by its requests, without a list. Proof and digest are not secret:
they are useless without the guest's key, and reveal nothing about the host's key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

_SCHEME, _GUEST = b"bearer", b"guest"


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def guest_proof(api_key: str, guest: str, digest: str) -> str:
    """Return the proof that a key belongs to a guest.

    Args:
        api_key: key of the run with the trainer.
        guest: name of the guest.
        digest: digest of the guest's own key (`key_digest`).
    """
    return hmac.new(api_key.encode(), f"rlrun guest {guest} {digest}".encode(), hashlib.sha256).hexdigest()


def guest_key(guest: str, key: str, proof: str) -> str:
    """Return the key that a guest sends to its host's trainer and engines: name, own key and proof in one."""
    return f"{_GUEST.decode()}.{guest}.{key}.{proof}"


def calling_guest(authorization: Sequence[str | bytes], api_key: str) -> str | None:
    """Return the name of the guest whose key a request contains; an empty name for the run's own key; None for neither.

    Args:
        authorization: values as in `holds_key`.
        api_key: key of the run that received the request.
    """
    if holds_key(authorization, api_key):
        return ""
    if len(authorization) != 1:
        return None
    scheme, given = _given_key(authorization[0])
    kind, _, rest = given.partition(b".")
    parts = rest.rsplit(b".", 2)
    if scheme.lower() != _SCHEME or kind != _GUEST or len(parts) != 3:
        return None
    try:
        guest, key = parts[0].decode(), parts[1].decode()
    except UnicodeDecodeError:
        return None
    right = guest_proof(api_key, guest, key_digest(key)).encode()
    genuine = hmac.compare_digest(hashlib.sha256(parts[2]).digest(), hashlib.sha256(right).digest())
    return guest if genuine and guest else None


def holds_key(authorization: Sequence[str | bytes], api_key: str) -> bool:
    """Return whether a request contains the run's key.

    Args:
        authorization: all values of its `Authorization` header, as text or as received bytes; any text is accepted, even if no encoding
            can represent it.
        api_key: key of the run.
    """
    if len(authorization) != 1:
        return False
    scheme, given = _given_key(authorization[0])
    # Digests have equal lengths, so the comparison does not reveal the length of the key.
    digests = (hashlib.sha256(part).digest() for part in (given, api_key.encode()))
    return scheme.lower() == _SCHEME and hmac.compare_digest(*digests)


def _given_key(value: str | bytes) -> tuple[bytes, bytes]:
    scheme, _, given = (value if isinstance(value, bytes) else value.encode(errors="surrogatepass")).partition(b" ")
    return scheme, given.strip()
