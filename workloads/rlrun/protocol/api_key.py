"""The run's key in a request's headers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


def holds_key(authorization: Sequence[str | bytes], api_key: str) -> bool:
    """Whether a request carries the run's key.

    Args:
        authorization: all values of its `Authorization` header, as text or as the bytes that came; any text is taken, also one that no
            encoding can hold.
        api_key: the run's key.
    """
    if len(authorization) != 1:
        return False
    value = authorization[0]
    scheme, _, given = (value if isinstance(value, bytes) else value.encode(errors="surrogatepass")).partition(b" ")
    # Digests have equal lengths: the comparison tells nothing about the key, not even how long it is.
    digests = (hashlib.sha256(part).digest() for part in (given.strip(), api_key.encode()))
    return scheme.lower() == b"bearer" and hmac.compare_digest(*digests)
