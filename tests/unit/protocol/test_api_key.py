"""Keys: the run's own, those of its guests, and everything else that a header may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.protocol.messages.endpoints import calling_guest, guest_key, guest_proof, holds_key, key_digest

KEY, OWN = "the-key-of-the-host", "the-key-of-the-guest"


def confirmed(guest: str, own: str = OWN, *, by: str = KEY) -> str:
    """What a guest sends after the host of this key has confirmed its own."""
    return guest_key(guest, own, guest_proof(by, guest, key_digest(own)))


def test_a_guests_key_names_the_guest_and_is_not_the_runs_own() -> None:
    key = confirmed("a-guest")
    assert calling_guest([f"Bearer {key}"], KEY) == calling_guest([f"bearer  {key} ".encode()], KEY) == "a-guest"
    assert calling_guest([f"Bearer {KEY}"], KEY) == ""
    assert not holds_key([f"Bearer {key}"], KEY)
    assert KEY not in key


def test_proof_and_digest_alone_open_nothing() -> None:
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
def test_what_looks_like_a_guests_key_opens_nothing(given: str) -> None:
    assert calling_guest([f"Bearer {given}"], KEY) is None


def test_two_headers_none_and_another_scheme_are_no_key() -> None:
    key = confirmed("a-guest")
    assert calling_guest([], KEY) is None
    assert calling_guest([f"Bearer {key}", f"Bearer {key}"], KEY) is None
    assert calling_guest([f"Basic {key}"], KEY) is None


NAMES = st.text("abc-xyz.019", min_size=1, max_size=40)


@given(name=NAMES, other=NAMES)
def test_a_proof_is_of_one_name(name: str, other: str) -> None:
    assert calling_guest([f"Bearer {confirmed(name)}"], KEY) == name
    stolen = guest_key(other, OWN, guest_proof(KEY, name, key_digest(OWN)))
    assert calling_guest([f"Bearer {stolen}"], KEY) == (name if other == name else None)


@given(value=st.one_of(st.text(), st.binary(), st.binary().map(lambda rest: b"Bearer guest." + rest)))
def test_no_header_is_taken_for_a_key_or_ends_in_an_error(value: str | bytes) -> None:
    assert calling_guest([value], KEY) is None
