"""Keys in a request's headers: the run's own, and those of its guests.

A guest (`trainer.sharedWith`) has a key like any run. When it joins, the trainer confirms the digest of that key with a proof that only the
host's key can make, so that trainer and engines know a guest by what it sends, without a list. Proof and digest are no secrets: they open
nothing without the guest's key, and neither reveals anything about the host's.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

_SCHEME, _GUEST = b"bearer", b"guest"


def key_digest(key: str) -> str:
    """SHA-256 of a key, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def guest_proof(api_key: str, guest: str, digest: str) -> str:
    """Confirmation that a key is of a guest.

    Args:
        api_key: of the run that has the trainer.
        guest: name of the other one.
        digest: of the guest's own key (`key_digest`).
    """
    return hmac.new(api_key.encode(), f"rlrun guest {guest} {digest}".encode(), hashlib.sha256).hexdigest()


def guest_key(guest: str, key: str, proof: str) -> str:
    """Key with which a guest asks its host's trainer and engines: name, own key and proof in one."""
    return f"{_GUEST.decode()}.{guest}.{key}.{proof}"


def calling_guest(authorization: Sequence[str | bytes], api_key: str) -> str | None:
    """Name of the guest whose key a request carries; the empty name: the key is the run's own; None: it is neither.

    Args:
        authorization: as in `holds_key`.
        api_key: of the run that is asked.
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
    """True if a request carries the run's key.

    Args:
        authorization: all values of its `Authorization` header, as text or as the bytes that came; any text is taken, also one that no
            encoding can hold.
        api_key: the run's key.
    """
    if len(authorization) != 1:
        return False
    scheme, given = _given_key(authorization[0])
    # Digests have equal lengths: the comparison reveals nothing about the key, not even how long it is.
    digests = (hashlib.sha256(part).digest() for part in (given, api_key.encode()))
    return scheme.lower() == _SCHEME and hmac.compare_digest(*digests)


def _given_key(value: str | bytes) -> tuple[bytes, bytes]:
    scheme, _, given = (value if isinstance(value, bytes) else value.encode(errors="surrogatepass")).partition(b" ")
    return scheme, given.strip()
