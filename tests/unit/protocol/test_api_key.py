"""API keys of runs and guests in request headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.protocol.messages.endpoints import calling_guest, guest_key, guest_proof, holds_key, key_digest

KEY, OWN = "the-key-of-the-host", "the-key-of-the-guest"


def confirmed(guest: str, own: str = OWN, *, by: str = KEY) -> str:
    """Return the key that a guest sends after the host has confirmed it."""
    return guest_key(guest, own, guest_proof(by, guest, key_digest(own)))


def test_guest_key_names_guest_and_differs_from_run_key() -> None:
    key = confirmed("a-guest")
    assert calling_guest([f"Bearer {key}"], KEY) == calling_guest([f"bearer  {key} ".encode()], KEY) == "a-guest"
    assert calling_guest([f"Bearer {KEY}"], KEY) == ""
    assert not holds_key([f"Bearer {key}"], KEY)
    assert KEY not in key


def test_proof_or_digest_is_not_a_valid_key() -> None:
    digest = key_digest(OWN)
    proof = guest_proof(KEY, "a-guest", digest)
    for other in (digest, proof, "", "x", OWN + "x"):
        assert calling_guest([f"Bearer {guest_key('a-guest', other, proof)}"], KEY) is None
    assert calling_guest([f"Bearer {guest_key('a-guest', OWN, digest)}"], KEY) is None
    assert calling_guest([f"Bearer {OWN}"], KEY) is None


@pytest.mark.parametrize(
    "given",
    [
        confirmed("a-guest").replace("a-guest", "another"),
        confirmed("a-guest", by="another-key"),
        confirmed("a-guest", by=OWN),
        confirmed("a-guest")[:-1],
        confirmed("a-guest").upper(),
        confirmed(""),
        "guest.a-guest..",
        "guest...",
        "guest",
        "",
    ],
)
def test_malformed_guest_key_is_refused(given: str) -> None:
    assert calling_guest([f"Bearer {given}"], KEY) is None


def test_missing_duplicate_or_non_bearer_header_is_refused() -> None:
    key = confirmed("a-guest")
    assert calling_guest([], KEY) is None
    assert calling_guest([f"Bearer {key}", f"Bearer {key}"], KEY) is None
    assert calling_guest([f"Basic {key}"], KEY) is None


NAMES = st.text("abc-xyz.019", min_size=1, max_size=40)


@given(name=NAMES, other=NAMES)
def test_guest_proof_is_valid_for_one_name(name: str, other: str) -> None:
    assert calling_guest([f"Bearer {confirmed(name)}"], KEY) == name
    stolen = guest_key(other, OWN, guest_proof(KEY, name, key_digest(OWN)))
    assert calling_guest([f"Bearer {stolen}"], KEY) == (name if other == name else None)


@given(value=st.one_of(st.text(), st.binary(), st.binary().map(lambda rest: b"Bearer guest." + rest)))
def test_arbitrary_header_is_refused_without_error(value: str | bytes) -> None:
    assert calling_guest([value], KEY) is None
